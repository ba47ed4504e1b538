"use strict";
// Sorts tables by the column whose head is pressed, filters their rows, and shows a chart large.
const collator = new Intl.Collator(undefined, { numeric: true });
function valueOf(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value ?? cell.textContent.trim();
}
function placeRows(body, rows) {
  let at = body.firstElementChild;
  for (const row of rows) {
    if (row === at) at = at.nextElementSibling;
    else body.insertBefore(row, at);
  }
}
function sortRows(head) {
  const body = head.closest("table").tBodies[0], column = head.cellIndex, numeric = head.classList.contains("number");
  const order = head.getAttribute("aria-sort") === "ascending" ? 1 : -1;
  const rows = [...body.rows].map((row) => ({ row, value: valueOf(row, column) }));
  const none = (value) => value === "" || (numeric && Number.isNaN(Number(value)));
  rows.sort((a, b) => {
    if (none(a.value) || none(b.value)) return none(a.value) - none(b.value);
    return order * (numeric ? a.value - b.value : collator.compare(a.value, b.value));
  });
  placeRows(body, rows.map((each) => each.row));
}
function sortBy(head) {
  const first = head.classList.contains("number") ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const next = head.getAttribute("aria-sort") === first ? other : first;
  for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", next);
  sortRows(head);
}
function filterRows(input) {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of document.getElementById(input.dataset.filters).tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
}
function showLarge(chart) {
  const dialog = document.createElement("dialog"), large = chart.cloneNode(true), close = document.createElement("button");
  large.classList.remove("small");
  const title = document.createElement("p");
  title.textContent = chart.getAttribute("aria-label");
  close.textContent = "Close";
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  dialog.append(title, large, close);
  document.body.append(dialog);
  dialog.showModal();
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("th button"), chart = event.target.closest("svg.chart");
  if (button) sortBy(button.closest("th"));
  else if (chart && !chart.closest("dialog")) showLarge(chart);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches?.("svg.chart")) showLarge(event.target);
});
document.addEventListener("input", (event) => {
  if (event.target.dataset.filters) filterRows(event.target);
});
