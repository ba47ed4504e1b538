"use strict";
// Sorts tables by the column whose head is pressed, filters their rows, shows more of long ones, and a chart large.
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
  filterRows(head.closest("table"));
}
function sortBy(head) {
  const first = head.classList.contains("number") ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const next = head.getAttribute("aria-sort") === first ? other : first;
  for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", next);
  sortRows(head);
}
// Shows the rows that the field above the table lets through; the first of them, where the table says how many.
function filterRows(table) {
  const input = document.querySelector(`input[data-filters="${table.id}"]`), most = Number(table.dataset.most ?? Infinity);
  const words = (input?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const row of table.tBodies[0].rows) {
    const text = words.length ? row.textContent.toLowerCase() : "";
    const matches = words.every((word) => text.includes(word));
    found += matches;
    row.hidden = !matches || found > most;
  }
  const more = document.querySelector(`button[data-more="${table.id}"]`);
  if (more) more.hidden = found <= most;
}
function showMore(button) {
  const table = document.getElementById(button.dataset.more);
  table.dataset.most = Number(table.dataset.most) + 25;
  filterRows(table);
  nearEnd.unobserve(button);
  nearEnd.observe(button); // which reports once more where the button is
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
  if (event.target.matches("button[data-more]")) showMore(event.target);
  else if (button) sortBy(button.closest("th"));
  else if (chart && !chart.closest("dialog")) showLarge(chart);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches?.("svg.chart")) showLarge(event.target);
});
document.addEventListener("input", (event) => {
  if (event.target.dataset.filters) filterRows(document.getElementById(event.target.dataset.filters));
});
for (const table of document.querySelectorAll("table[data-most]")) filterRows(table);
const nearEnd = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) showMore(entry.target);
}, { rootMargin: "600px" });
for (const more of document.querySelectorAll("button[data-more]")) nearEnd.observe(more);
