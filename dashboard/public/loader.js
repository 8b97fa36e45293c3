// Starts the pages of an exported file: unpacks modules, styles and data. Modules become blobs, which an import map names.
(async () => {
  const bytes = Uint8Array.from(atob(document.getElementById("payload").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { entry, modules, style, content } = JSON.parse(await new Response(unpacked).text());
  globalThis.telescopeExport = content;
  document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
  const source = (text) => URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  const imports = Object.fromEntries(Object.entries(modules).map(([name, text]) => [name, source(text)]));
  const map = { type: "importmap", textContent: JSON.stringify({ imports }) };
  document.head.append(Object.assign(document.createElement("script"), map));
  await import(entry);
})().catch((error) => (document.getElementById("root").textContent = `This browser cannot show the file: ${error}`));
