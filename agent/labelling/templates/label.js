"use strict";
// Shows the oldest frame that waits for its label, takes a class or boxes from people, and sends what they say.
const CLASS_KEYS = "123456789acdefghijklopqrtvwxyz"; // without those of the buttons
const COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"]; // Okabe and Ito's
const HANDLE_PX = 9, CLICK_PX = 4, MOST_SCALE = 12, POLL_MS = 5000;
const at = (id) => document.getElementById(id);
const canvas = at("picture"), pen = canvas.getContext("2d"), search = at("search"), classes = at("classes");

let model = { form: "", labels: [] };
let shown = { frame: null, previous: null };
let picture = null, scale = 1;
let boxes = [], chosen = -1, past = []; // {class, box: [x1, y1, x2, y2] in frame pixels}; undo goes back through `past`
let current = 0; // the class of the next box: that of the last one
let suggested = false, busy = false, drag = null;

async function request(path, body) {
  const sent = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(path, body === undefined ? {} : sent).catch(() => {
    throw new Error("The server does not answer. Is “tared label” still running?");
  });
  const text = await answer.text();
  if (answer.ok) return JSON.parse(text);
  let reason = text.trim();
  try {
    const error = JSON.parse(text).error;
    reason = `${error.found}; expected ${error.expected}; ${error.remedy}`;
  } catch { /* a plain text */ }
  throw new Error(reason);
}
function say(text, isBad = false) {
  at("message").textContent = text;
  at("message").classList.toggle("bad", isBad);
}
async function attempt(work) {
  if (busy) return;
  busy = true;
  try {
    await work();
  } catch (error) {
    say(error.message, true);
  } finally {
    busy = false;
    draw();
  }
}
const nameOf = (number) => model.labels[number] ?? String(number);
const isDetector = () => model.form === "boxes";
const isDrawnElsewhere = () => model.form === "shapes"; // masks, key points, oriented boxes

async function show(next) {
  shown = next;
  const frame = next.frame;
  at("count").textContent = `${next.done} of ${next.drawn}`;
  at("progress").max = Math.max(1, next.drawn);
  at("progress").value = next.done;
  at("work").hidden = false;
  for (const id of ["stage", "help", "skip"]) at(id).hidden = !frame;
  for (const id of ["classes", "searching"]) at(id).hidden = !frame || isDrawnElsewhere();
  for (const id of ["save", "editing"]) at(id).hidden = !frame || !isDetector();
  at("nothing").hidden = !frame || !(isDetector() || isDrawnElsewhere());
  boxes = []; chosen = -1; past = []; drag = null; picture = null; suggested = false;
  search.value = "";
  filterClasses();
  if (!frame) {
    at("facts").textContent = "";
    say(next.drawn ? "Every drawn frame is done. New ones appear here." : "No frame is drawn yet.");
    return;
  }
  if (isDetector() && frame.label) boxes = frame.label.map((each) => ({ class: each.class, box: [...each.box] }));
  suggested = frame.suggested;
  const image = new Image();
  image.src = `pictures/${frame.id}.jpg`;
  const isSound = await image.decode().then(() => true, () => false);
  at("facts").textContent = `frame ${frame.id}, camera ${frame.camera}, drawn ${frame.drawn}, ${frame.width} × ${frame.height}`;
  if (!isSound) {
    say("The picture of this frame is gone or damaged. Skip it.", true);
    draw();
    return;
  }
  picture = image;
  say(earlier(frame));
  layOut();
}
function earlier(frame) {
  if (frame.skipped) return "This frame was skipped. A label takes its place.";
  if (frame.label === null) return "";
  if (isDrawnElsewhere()) return "This frame has a label. “Nothing there” replaces it.";
  return isDetector() ? "This frame has a label. Save replaces it." : `Labelled as ${nameOf(frame.label)}. Another class replaces it.`;
}
async function send(body) {
  await attempt(async () => show(await request(`frames/${shown.frame.id}`, body)));
}

// --- the picture, and boxes in it
function layOut() {
  if (!picture) return;
  const { width, height } = shown.frame, ratio = window.devicePixelRatio || 1;
  scale = Math.min(at("stage").clientWidth / width, Math.max(240, window.innerHeight * 0.78) / height, MOST_SCALE);
  canvas.width = Math.round(width * scale * ratio);
  canvas.height = Math.round(height * scale * ratio);
  canvas.style.width = `${width * scale}px`;
  canvas.style.height = `${height * scale}px`;
  draw();
}
function draw() {
  const frame = shown.frame;
  at("nothing").disabled = boxes.length > 0;
  at("save").disabled = !boxes.length;
  at("model").disabled = boxes.length > 0;
  at("undo").disabled = !past.length;
  at("remove").disabled = chosen < 0;
  at("back").disabled = shown.previous === null;
  const pressed = isDetector() ? (chosen < 0 ? current : boxes[chosen].class) : frame?.label;
  for (const each of classes.children) each.setAttribute("aria-pressed", String(Number(each.dataset.number) === pressed));
  if (!frame || !picture) return;
  const count = boxes.length === 1 ? "1 box" : `${boxes.length} boxes`;
  canvas.setAttribute("aria-label", `Frame ${frame.id}${isDetector() ? `, ${count}` : ""}`);
  const ratio = window.devicePixelRatio || 1;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.imageSmoothingEnabled = scale < 3;
  pen.drawImage(picture, 0, 0, frame.width * scale, frame.height * scale);
  boxes.forEach((each, index) => index !== chosen && drawBox(each, false));
  if (chosen >= 0) drawBox(boxes[chosen], true);
}
function drawBox(each, isChosen) {
  const [x1, y1, x2, y2] = each.box.map((value) => value * scale), colour = COLOURS[each.class % COLOURS.length];
  for (const [style, width] of [["#000", isChosen ? 6 : 4], [colour, isChosen ? 4 : 2]]) {
    pen.strokeStyle = style;
    pen.lineWidth = width;
    pen.strokeRect(x1, y1, x2 - x1, y2 - y1);
  }
  pen.font = "13px system-ui, sans-serif";
  const name = nameOf(each.class), wide = pen.measureText(name).width + 8, top = y1 >= 18 ? y1 - 18 : y1;
  pen.fillStyle = colour;
  pen.fillRect(x1, top, wide, 18);
  pen.fillStyle = "#000";
  pen.fillText(name, x1 + 4, top + 13);
  if (!isChosen) return;
  for (const [x, y] of corners(each.box)) {
    pen.fillStyle = "#fff";
    pen.fillRect(x * scale - 4, y * scale - 4, 8, 8);
    pen.strokeStyle = "#000";
    pen.lineWidth = 1;
    pen.strokeRect(x * scale - 4, y * scale - 4, 8, 8);
  }
}
const corners = ([x1, y1, x2, y2]) => [[x1, y1], [x2, y1], [x1, y2], [x2, y2]];
const clamp = (value, most) => Math.min(Math.max(value, 0), most);
function remember() {
  past.push(JSON.stringify(boxes));
}
function undo() {
  if (!past.length) return;
  boxes = JSON.parse(past.pop());
  chosen = -1;
  draw();
}
function ordered([x1, y1, x2, y2]) {
  return [Math.min(x1, x2), Math.min(y1, y2), Math.max(x1, x2), Math.max(y1, y2)];
}
function moved([x1, y1, x2, y2], dx, dy) {
  const { width, height } = shown.frame;
  const right = Math.min(Math.max(dx, -x1), width - x2), down = Math.min(Math.max(dy, -y1), height - y2);
  return [x1 + right, y1 + down, x2 + right, y2 + down];
}
function add(box) {
  remember();
  boxes.push({ class: current, box });
  chosen = boxes.length - 1;
}
function addInTheMiddle() {
  const { width, height } = shown.frame;
  add([width * 0.375, height * 0.375, width * 0.625, height * 0.625]);
  canvas.focus();
  draw();
}
function remove() {
  if (chosen < 0) return;
  remember();
  boxes.splice(chosen, 1);
  chosen = -1;
  draw();
}
function smallestAt(x, y) {
  let found = -1, least = Infinity;
  boxes.forEach(({ box: [x1, y1, x2, y2] }, index) => {
    const area = (x2 - x1) * (y2 - y1);
    if (x >= x1 && x <= x2 && y >= y1 && y <= y2 && area < least) [found, least] = [index, area];
  });
  return found;
}
function placeOf(event) {
  const corner = canvas.getBoundingClientRect(), { width, height } = shown.frame;
  return [clamp((event.clientX - corner.left) / scale, width), clamp((event.clientY - corner.top) / scale, height)];
}
canvas.addEventListener("pointerdown", (event) => {
  if (!isDetector() || !picture || event.button !== 0) return;
  canvas.setPointerCapture(event.pointerId);
  const [x, y] = placeOf(event), reach = (event.pointerType === "touch" ? 2 : 1) * HANDLE_PX / scale;
  drag = { from: [x, y], kind: "draw", isMoving: false };
  if (chosen < 0 || event.shiftKey) return;
  const box = boxes[chosen].box;
  drag.box = [...box];
  drag.corner = corners(box).findIndex(([cx, cy]) => Math.abs(cx - x) <= reach && Math.abs(cy - y) <= reach);
  if (drag.corner >= 0) drag.kind = "resize";
  else if (x >= box[0] && x <= box[2] && y >= box[1] && y <= box[3]) drag.kind = "move";
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const [x, y] = placeOf(event), [fromX, fromY] = drag.from;
  if (!drag.isMoving) {
    if (Math.max(Math.abs(x - fromX), Math.abs(y - fromY)) * scale < CLICK_PX) return;
    drag.isMoving = true;
    if (drag.kind === "draw") add([fromX, fromY, x, y]);
    else remember();
  }
  const box = boxes[chosen];
  if (drag.kind === "draw") box.box = ordered([fromX, fromY, x, y]);
  else if (drag.kind === "move") box.box = moved(drag.box, x - fromX, y - fromY);
  else {
    const [fixedX, fixedY] = corners(drag.box)[3 - drag.corner];
    box.box = ordered([fixedX, fixedY, x, y]);
  }
  draw();
});
function endDrag() {
  if (!drag) return;
  if (!drag.isMoving) chosen = smallestAt(...drag.from);
  else if (boxes[chosen].box[0] === boxes[chosen].box[2] || boxes[chosen].box[1] === boxes[chosen].box[3]) undo();
  drag = null;
  draw();
}
canvas.addEventListener("pointerup", endDrag);
canvas.addEventListener("pointercancel", endDrag);

// --- classes
function make(tag, textContent = "", className = "") {
  return Object.assign(document.createElement(tag), { textContent, className });
}
function makeClasses() {
  classes.replaceChildren(...model.labels.map((label, number) => {
    const button = make("button"), swatch = make("span", "", "swatch");
    button.dataset.number = number;
    swatch.style.color = COLOURS[number % COLOURS.length];
    if (isDetector()) button.append(swatch);
    button.append(make("span", label));
    if (number < CLASS_KEYS.length) button.append(make("kbd", CLASS_KEYS[number]));
    button.addEventListener("click", () => choose(number));
    return button;
  }));
  search.placeholder = model.labels.length ? "name" : "number of the class";
}
function filterClasses() {
  const words = search.value.trim().toLowerCase();
  for (const each of classes.children) each.hidden = !model.labels[each.dataset.number].toLowerCase().includes(words);
}
function choose(number) {
  if (!shown.frame || !picture || isDrawnElsewhere()) return;
  if (!isDetector()) {
    send({ label: number });
    return;
  }
  current = number;
  if (chosen >= 0 && boxes[chosen].class !== number) {
    remember();
    boxes[chosen].class = number;
  }
  draw();
}
function chooseFound() {
  const words = search.value.trim(), first = [...classes.children].find((each) => !each.hidden);
  const named = model.labels.findIndex((label) => label.toLowerCase() === words.toLowerCase());
  let number = named >= 0 ? named : first ? Number(first.dataset.number) : -1;
  if (!model.labels.length && /^\d{1,5}$/.test(words)) number = Number(words);
  if (!words || number < 0) {
    say(`No class is called ${words || "so"}.`, true);
    return;
  }
  search.value = "";
  filterClasses();
  search.blur();
  choose(number);
}
search.addEventListener("input", filterClasses);

// --- buttons and keys
const actions = {
  save: () => boxes.length ? send({ label: boxes, suggested }) : say("Draw the boxes, or press 0 if nothing is there.", true),
  nothing: () => boxes.length ? say("There are boxes. Delete them first, or press Enter to save.", true) : send({ label: [], suggested }),
  skip: () => send({ skip: true }),
  back: () => shown.previous !== null && attempt(async () => show(await request(`frames/${shown.previous}`))),
  add: addInTheMiddle,
  remove,
  undo,
  model: () => !boxes.length && attempt(async () => {
    const found = await request(`reference/${shown.frame.id}`);
    remember();
    boxes = found;
    suggested = true;
    say(boxes.length ? "These are the model’s boxes. Correct them, then save." : "The model has no box here.");
  }),
};
const needsPicture = ["save", "nothing", "add", "remove", "undo", "model"];
function act(id) {
  if (at(id).offsetParent === null || (needsPicture.includes(id) && !picture)) return;
  actions[id]();
}
for (const id of Object.keys(actions)) at(id).addEventListener("click", () => act(id));
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function nudge(event) {
  const step = event.ctrlKey ? 1 : Math.max(1, Math.round(Math.max(shown.frame.width, shown.frame.height) / 100));
  const [dx, dy] = ARROWS[event.key].map((value) => value * step), { width, height } = shown.frame;
  const [x1, y1, x2, y2] = boxes[chosen].box;
  remember();
  boxes[chosen].box = event.shiftKey
    ? [x1, y1, Math.max(x1 + 1, clamp(x2 + dx, width)), Math.max(y1 + 1, clamp(y2 + dy, height))]
    : moved(boxes[chosen].box, dx, dy);
  draw();
}
function pressKey(event) {
  if (event.target === search) {
    if (event.key === "Enter") chooseFound();
    if (event.key === "Escape") { search.value = ""; filterClasses(); search.blur(); }
    return event.key === "Enter" || event.key === "Escape";
  }
  if (event.key in ARROWS && chosen >= 0) { nudge(event); return true; }
  if ((event.ctrlKey || event.metaKey) && event.key === "z") { act("undo"); return true; }
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  if (event.target.tagName === "BUTTON" && (event.key === "Enter" || event.key === " ")) return false; // presses it
  if (event.key === "/" && !isDrawnElsewhere()) { search.focus(); return true; }
  if (event.key === "Escape") { chosen = -1; draw(); return true; }
  if ((event.key === "." || event.key === ",") && boxes.length) {
    const from = chosen < 0 && event.key === "," ? 0 : chosen;
    chosen = (from + (event.key === "." ? 1 : -1) + boxes.length) % boxes.length;
    draw();
    return true;
  }
  const key = event.key === "Backspace" ? "Delete" : event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const button = Object.keys(actions).find((id) => at(id).dataset.key === key && at(id).offsetParent !== null);
  const number = CLASS_KEYS.indexOf(key);
  if (button) act(button);
  else if (key.length === 1 && number >= 0 && number < model.labels.length) choose(number);
  else return false;
  return true;
}
document.addEventListener("keydown", (event) => {
  if (!event.repeat || event.key in ARROWS) {
    if (shown.frame || event.key.toLowerCase() === "b") { if (pressKey(event)) event.preventDefault(); }
  }
});
window.addEventListener("resize", layOut);
setInterval(() => model.form && !shown.frame && attempt(async () => show(await request("waiting"))), POLL_MS);

attempt(async () => {
  model = await request("model");
  document.body.className = model.form;
  makeClasses();
  at("help").textContent = isDrawnElsewhere()
    ? "Masks, key points and oriented boxes are drawn in another tool, such as CVAT: tared label --export writes COCO’s JSON with the model’s answers "
      + "to correct, --import reads it. Here say of a frame that nothing is there, or skip it."
    : isDetector() ? "Draw a box with the mouse or a finger, then press the key of its class; the next box begins with that class. Drag a chosen box or its corners, "
      + "or use the arrow keys (with Shift: its size, with Ctrl: one pixel). Shift and drag draws within a chosen box; . and , choose the next or previous box, Esc none."
    : "Press the key of the class, or find it by its name. Back shows the frame before, to correct it.";
  await show(await request("waiting"));
});
