'use strict';

// the entries that are kept, and the text

const $ = id => document.getElementById(id);
const data = JSON.parse($('data').textContent);
const { tokens, choices } = data;
const n = tokens.length;
const cut = choices.length > 0;
const make = (tag, properties = {}) => Object.assign(document.createElement(tag), properties);
const number = x => x.toLocaleString('en');
const percent = x => (100 * x).toFixed(1) + ' %';
const quoted = (from, to) => tokens.slice(from, to).map(visible).join('').slice(0, 60).trim();

// ---- which entries are kept: a bit per (layer, head) pair and token, at the selection that is shown

const pairs = [];
data.layers.forEach((layer, row) => {
  for (let head = 0; head < (data.heads[row] || 0); head++) pairs.push({ layer, row, head });
});
const kept = pairs.map(() => new Uint8Array(n));
const perLayer = data.layers.map(() => new Uint16Array(n));
const counts = new Uint16Array(n); // of the chosen pairs
const came = new Uint16Array(n);
const left = new Uint16Array(n);
let chosen = pairs.map((_, i) => i);
let shown = -1; // choice
let now = -1; // token

function unpack(text, use) {
  const bytes = atob(text.slice(1));
  if (text[0] === 'b') {
    for (let i = 0; i < n; i++) if (bytes.charCodeAt(i >> 3) >> (i & 7) & 1) use(i);
    return;
  }
  let at = -1, value = 0, shift = 0;
  for (let i = 0; i < bytes.length; i++) {
    const byte = bytes.charCodeAt(i);
    value += (byte & 127) * 2 ** shift;
    if (byte & 128) { shift += 7; continue; }
    at += value + 1;
    use(at);
    value = shift = 0;
  }
}

// sets of a later choice are differences, so applying one twice undoes it
const flip = choice => choice.sets.forEach((set, i) => unpack(set, at => { kept[i][at] ^= 1; }));

function showChoice(index) {
  while (shown < index) flip(choices[++shown]);
  while (shown > index) flip(choices[shown--]);
  perLayer.forEach(layer => layer.fill(0));
  pairs.forEach((pair, i) => {
    const sum = perLayer[pair.row], bits = kept[i];
    for (let at = 0; at < n; at++) sum[at] += bits[at];
  });
}

function count() {
  counts.fill(0); came.fill(0); left.fill(0);
  for (const i of chosen) {
    const bits = kept[i];
    for (let at = 0; at < n; at++) counts[at] += bits[at];
    if (shown > 0) unpack(choices[shown].sets[i], at => { (bits[at] ? came : left)[at]++; });
  }
}

function part(i) {
  const [from, to] = choices[shown].window;
  if (i >= from && i < to) return 'window';
  if (i < data.nSinks) return 'sink';
  if (i >= choices[0].rows) return 'answer';
  return i >= data.nPrompt ? 'draft' : '';
}

// small shares are many, so that the scale is one of roots
const opacity = share => 0.6 * Math.sqrt(share);

// ---- text: blocks of plain text, which have a span per token only while they are near the screen

function visible(text) {
  if (text === '') return '\u00b7';
  return text.replace(/\n/g, '\u21b5\n').replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, c => {
    const code = c.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : '\u27e8' + code.toString(16).toUpperCase() + '\u27e9';
  });
}

const blocks = [];
const blockOf = new Uint32Array(n);
for (let from = 0; from < n;) {
  const end = from < data.nPrompt ? data.nPrompt : n;
  // a block ends its line, so it ends with one of the text if there is any, else between words
  let to = Math.min(from + 600, end), space = 0;
  for (let i = from + 80; i < to; i++) {
    if (tokens[i - 1].endsWith('\n')) { to = i; space = 0; break; }
    if (/^\s/.test(tokens[i])) space = i;
  }
  if (space && to < end) to = space;
  const block = { from, to, live: false, element: make('div') };
  block.element.textContent = tokens.slice(from, to).map(visible).join('');
  blockOf.fill(blocks.length, from, to);
  blocks.push(block);
  from = to;
}
$('text').append(...blocks.map(block => block.element));

function paint(block) {
  if (!block.live || !cut) return;
  const moved = $('moved').checked;
  for (let i = block.from; i < block.to; i++) {
    const span = block.element.childNodes[i - block.from];
    const names = ['shaded', part(i), tokens[i] ? '' : 'bit',
      moved && came[i] > left[i] ? 'came' : '', moved && left[i] > came[i] ? 'left' : '',
      i === now ? 'now' : ''];
    span.className = names.filter(Boolean).join(' ');
    span.style.setProperty('--a', opacity(counts[i] / chosen.length).toFixed(3));
  }
}

function enliven(block, live) {
  if (block.live === live) return;
  block.live = live;
  const texts = tokens.slice(block.from, block.to).map(visible);
  if (live) {
    block.element.replaceChildren(...texts.map((text, i) => {
      const span = make('span', { textContent: text });
      span.dataset.i = block.from + i;
      return span;
    }));
    paint(block);
  } else block.element.textContent = texts.join('');
}

function spanOf(i) {
  const block = blocks[blockOf[i]];
  enliven(block, true);
  return block.element.childNodes[i - block.from];
}

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) enliven(blocks[watched.get(entry.target)], entry.isIntersecting);
}, { rootMargin: '800px' });
const watched = new Map(blocks.map((block, i) => [block.element, i]));
if (cut) blocks.forEach(block => watcher.observe(block.element));

// ---- one line about what is pointed at

function tell(...parts) {
  $('readout').replaceChildren(...parts);
}

function tellToken(i) {
  const names = { window: 'window, always stays', sink: 'sink, always stays', draft: 'draft', answer: 'answer', '': 'past' };
  const layers = data.layers.map((layer, row) => [layer, perLayer[row][i], data.heads[row]]).filter(x => x[1]);
  const all = layers.reduce((sum, x) => sum + x[1], 0);
  const parts = [
    make('b', { textContent: `Token ${number(i + 1)} of ${number(n)}` }), ' ', make('code', { textContent: visible(tokens[i]) }),
    ` (${names[part(i)]}): kept by `, make('b', { textContent: `${number(counts[i])} of ${number(chosen.length)}` }),
    ` ${chosen.length === pairs.length ? '(layer, head) pairs' : 'chosen pairs'}, ${percent(counts[i] / chosen.length)}`,
  ];
  if (chosen.length < pairs.length) parts.push(`; of all ${number(pairs.length)}: ${number(all)}`);
  if (i >= choices[shown].rows) parts.push('; this selection was made before it');
  if (came[i] || left[i]) parts.push(`; at this selection it came into ${came[i]} and left ${left[i]}`);
  if (layers.length) parts.push('. By layer: ' + layers.map(x => `${x[0]}: ${x[1]}/${x[2]}`).join(', '));
  tell(...parts);
}

function point(i, scroll) {
  const before = now;
  now = Math.max(0, Math.min(n - 1, i));
  if (before >= 0) paint(blocks[blockOf[before]]);
  paint(blocks[blockOf[now]]);
  if (scroll) spanOf(now).scrollIntoView({ block: 'center', behavior: 'instant' });
  mark();
  tellToken(now);
}

function line(direction) {
  const here = spanOf(now).getBoundingClientRect();
  let best = now, distance = Infinity, top = null;
  for (let i = now + direction; i >= 0 && i < n && Math.abs(i - now) < 2000; i += direction) {
    const box = spanOf(i).getBoundingClientRect();
    if (direction * (box.top - here.top) < here.height / 2) continue;
    if (top === null) top = box.top;
    if (Math.abs(box.top - top) > here.height / 2) break;
    if (Math.abs(box.left - here.left) < distance) { best = i; distance = Math.abs(box.left - here.left); }
  }
  return best;
}

function nextKept(direction) {
  for (let i = now + direction; i >= 0 && i < n; i += direction) if (counts[i]) return i;
  return now;
}

const textKeys = {
  ArrowRight: () => now + 1, ArrowLeft: () => now - 1, ArrowDown: () => line(1), ArrowUp: () => line(-1),
  PageDown: () => now + 200, PageUp: () => now - 200, Home: () => 0, End: () => n - 1,
  n: () => nextKept(1), p: () => nextKept(-1),
};
const plain = event => !event.ctrlKey && !event.metaKey && !event.altKey;
