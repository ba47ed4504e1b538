"use strict";
// Takes the changed part of the page from the stream, shows how old things are, and sends forms without leaving.
const connection = document.getElementById("connection");
let lastPart = Date.now();
function showAges() {
  for (const time of document.querySelectorAll("time[data-at]")) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(time.dataset.at)));
    time.textContent = seconds < 120 ? `${seconds} s ago`
      : seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
  }
}
function sorted() {
  const heads = document.querySelectorAll("#part th[aria-sort]");
  return [...heads].map((head) => [head.closest("table").id, head.cellIndex, head.getAttribute("aria-sort")]);
}
function replacePart(html) {
  const part = document.getElementById("part"), orders = sorted(), scrolls = window.scrollY;
  part.innerHTML = html;
  for (const [id, column, direction] of orders) {
    const head = document.getElementById(id)?.tHead.rows[0].cells[column];
    for (let presses = 0; head && presses < 2 && head.getAttribute("aria-sort") !== direction; presses += 1) sortBy(head);
  }
  for (const input of document.querySelectorAll("input[data-filters]")) if (input.value) filterRows(input);
  window.scrollTo(0, scrolls);
  lastPart = Date.now();
  showAges();
}
function follow(path) {
  const stream = new EventSource(path);
  stream.addEventListener("part", (event) => replacePart(JSON.parse(event.data)));
  stream.addEventListener("open", () => { connection.textContent = "live"; connection.className = "good"; });
  stream.addEventListener("error", () => {
    connection.textContent = "the connection to this page's server is lost; trying again";
    connection.className = "bad";
  });
}
async function order(event) {
  const form = event.target;
  if (!form.matches("form[data-order]")) return;
  event.preventDefault();
  const fields = new URLSearchParams(new FormData(form, event.submitter));
  const answer = await fetch(form.action, { method: "POST", body: fields, headers: { "X-Requested-With": "page" } });
  if (!answer.ok) { connection.textContent = await answer.text(); connection.className = "bad"; }
}
if (document.body.dataset.live) follow(document.body.dataset.live);
document.addEventListener("submit", order);
setInterval(showAges, 1000);
showAges();
