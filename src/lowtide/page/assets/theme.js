"use strict";
// Before the first paint, so that a page that was left dark opens dark.
try {
  const chosen = localStorage.getItem("lowtide-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off for files in some browsers: the system's colours count then.
}
