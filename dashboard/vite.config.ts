import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// The server of `telescope ui` serves what is built here. `npm run dev` takes its data from a server on port 8005.
export default defineConfig({
  base: "./",
  plugins: [react()],
  build: { outDir: "../src/telescope/dashboard/static", emptyOutDir: true, chunkSizeWarningLimit: 900 },
  server: { proxy: { "/api": process.env.TELESCOPE_UI ?? "http://127.0.0.1:8005" } },
});
