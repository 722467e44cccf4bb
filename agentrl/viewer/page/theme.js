// Runs before the page is drawn, so that it never flashes in the other colours.
try {
  const chosen = localStorage.getItem("agentrl-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* storage is switched off */ }
