"""The pages in Chromium. A package, so that server and browser end with its last test."""
