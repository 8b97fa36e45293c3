import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

// Every browser that can run these pages reads woff2: the older fonts of KaTeX stay out.
const woff2Only = {
  name: "woff2-only",
  enforce: "pre" as const,
  transform: (code: string, id: string) =>
    id.includes("katex") && id.endsWith(".css") ? code.replace(/,url\([^)]+\.(?:woff|ttf)\) format\("[a-z]+"\)/g, "") : null,
};

// The server of `telescope ui` serves what is built here. `npm run dev` takes its data from a server on port 8005.
export default defineConfig({
  base: "./",
  plugins: [woff2Only, react()],
  build: {
    outDir: "../src/telescope/dashboard/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 900,
    // One file of what several pages share, instead of a dozen small ones that a page waits for.
    rolldownOptions: { output: { codeSplitting: { groups: [{ name: "shared", test: /dashboard\/src\//, minShareCount: 3 }] } } },
  },
  test: { css: true },
  server: { proxy: { "/api": process.env.TELESCOPE_UI ?? "http://127.0.0.1:8005" } },
});
