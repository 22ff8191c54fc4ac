// Puts a box above each long table that shows only the rows which hold all of the words typed into it.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table")) {
    const rows = [...table.tBodies].flatMap((body) => [...body.rows]);
    if (rows.length < 100) continue;
    const box = document.createElement("input");
    box.type = "search";
    box.placeholder = "filter rows: llama exact";
    box.setAttribute("aria-label", "Filter rows of the table below");
    box.addEventListener("input", () => {
      const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    table.before(box);
  }
});
