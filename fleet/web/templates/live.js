"use strict";
// Follows the stream of changes, shows how old things are, asks for live pictures, and sends forms without leaving.
const PICTURE_MS = 200, AGAIN_MS = 3000; // after a picture, and after a failure
const connection = document.getElementById("connection"), part = document.getElementById("part");
const live = document.getElementById("live"), image = live?.querySelector("img"), camera = live?.querySelector("select");
let ahead = 0; // of this browser's clock, in s, against the server's
let pictures = 0, asking = false;

function say(text, tone) { connection.textContent = text; connection.className = tone; }
function showAges() {
  for (const time of document.querySelectorAll("time[data-at]")) {
    const age = Math.round(Date.now() / 1000 - ahead - Number(time.dataset.at)), seconds = Math.max(0, age);
    time.textContent = age < -1 ? `in ${-age} s` : seconds < 120 ? `${seconds} s ago`
      : seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
  }
}

// A part is changed in place, so that focus, selection and what has been scrolled stay; so do these attributes of this page.
const keeps = [["tr, button[data-more]", "hidden"], ["th", "aria-sort"], ["table", "data-most"]];
function patch(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  const own = keeps.find(([selector]) => old.matches(selector))?.[1];
  for (const { name } of [...old.attributes]) if (name !== own && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (name !== own && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.matches("time[data-at]")) return;
  if (old.matches("tbody")) patchRows(old, fresh);
  else patchChildren(old, fresh);
}
function patchChildren(old, fresh) {
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((node, at) => {
    const was = before[at];
    if (!was) old.append(node);
    else if (was.nodeName !== node.nodeName || was.id !== node.id) was.replaceWith(node);
    else patch(was, node);
  });
  for (const node of before.slice(after.length)) node.remove();
}
// Rows are known by their keys, in whatever order this page shows them.
function mergedRows(body, rows) {
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  return rows.map((row) => {
    const old = known.get(row.dataset.key);
    if (old) patch(old, row);
    return old ?? row;
  });
}
function patchRows(body, fresh) {
  const head = body.parentElement.querySelector("th[aria-sort]");
  if (fresh.querySelector("tr[data-key]")) {
    const rows = mergedRows(body, [...fresh.rows]), kept = new Set(rows);
    for (const row of [...body.rows]) if (!kept.has(row)) row.remove();
    if (head) body.append(...rows.filter((row) => row.parentElement !== body));
    else placeRows(body, rows);
  } else patchChildren(body, fresh);
  if (head) sortRows(head);
  else filterRows(body.parentElement);
}
function showNewRows(html) {
  const table = document.getElementById("boards"), body = table.tBodies[0], fresh = document.createElement("template");
  fresh.innerHTML = `<table><tbody>${html}</tbody></table>`;
  body.append(...mergedRows(body, [...fresh.content.querySelectorAll("tr")]).filter((row) => row.parentElement !== body));
  table.hidden = false;
  sortRows(table.querySelector("th[aria-sort]"));
  showAges();
}
function showPart(html) {
  if (!html) return;
  if (!part) return location.reload(); // of a board that had not reported when this page was loaded
  const fresh = document.createElement("template");
  fresh.innerHTML = html;
  patchChildren(part, fresh.content);
  for (const more of part.querySelectorAll("button[data-more]")) nearEnd.observe(more); // some may be new
  readState();
  showAges();
}
function readState() {
  const state = document.getElementById("now");
  if (!state) return;
  ahead = Date.now() / 1000 - Number(state.dataset.now);
  for (const field of document.querySelectorAll("input[name=token]")) field.value = state.dataset.token;
  if (live) offerCameras(JSON.parse(state.dataset.cameras));
}

function follow(path) {
  const stream = new EventSource(path);
  stream.addEventListener("part", (event) => showPart(JSON.parse(event.data)));
  stream.addEventListener("rows", (event) => showNewRows(JSON.parse(event.data)));
  stream.addEventListener("read", (event) => {
    const time = document.getElementById("read-at");
    if (time) { time.dataset.at = JSON.parse(event.data); showAges(); }
  });
  stream.addEventListener("open", () => say("live", "good"));
  stream.addEventListener("error", () => {
    say("the connection to this page's server is lost; trying again", "bad");
    if (stream.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    setTimeout(() => follow(path), AGAIN_MS);
  });
}

// The live picture: one after the other, as long as the board has one and this page can be seen.
function offerCameras(names) {
  if (camera.dataset.names !== JSON.stringify(names)) {
    const chosen = camera.value;
    camera.dataset.names = JSON.stringify(names);
    camera.replaceChildren(...names.map(([name, shown]) => new Option(shown, name, false, name === chosen)));
    camera.hidden = names.length < 2;
  }
  live.hidden = names.length === 0;
  askForPicture();
}
function askForPicture() {
  if (asking || live.hidden || document.hidden) return;
  asking = true;
  pictures += 1;
  image.src = `${live.dataset.live}?camera=${encodeURIComponent(camera.value)}&n=${pictures}`;
}
function wait(ms) {
  setTimeout(() => { asking = false; askForPicture(); }, ms);
}
function showPicture() {
  live.querySelector("time").dataset.at = Date.now() / 1000 - ahead;
  live.querySelector("output").textContent = "";
  wait(PICTURE_MS);
}
async function explainPicture() {
  const answer = await fetch(image.src).catch(() => null);
  const reason = answer === null ? "this page's server does not answer" : answer.ok ? "" : await answer.text();
  live.querySelector("output").textContent = reason;
  wait(AGAIN_MS);
}

async function order(event) {
  const form = event.target;
  if (!form.matches("form[data-order]")) return;
  event.preventDefault();
  const fields = new URLSearchParams(new FormData(form, event.submitter));
  const answer = await fetch(form.action, { method: "POST", body: fields, headers: { "X-Requested-With": "page" } })
    .catch(() => null);
  if (!answer?.ok) say(answer ? await answer.text() : "not sent: this page's server does not answer", "bad");
}

readState();
if (document.body.dataset.live) follow(document.body.dataset.live);
document.addEventListener("submit", order);
image?.addEventListener("load", showPicture);
image?.addEventListener("error", explainPicture);
document.addEventListener("visibilitychange", () => { if (live) askForPicture(); });
setInterval(showAges, 1000);
showAges();
