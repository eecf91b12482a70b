// maps, controls, start

// ---- layers and KV heads

const cells = [];
let cellAt = 0;
const pairAt = (row, head) => pairs.findIndex(pair => pair.row === row && pair.head === head);

function buildGrid() {
  const top = make('tr');
  top.append(make('th', { textContent: 'head \\ layer' }), ...data.layers.map(layer => make('th', { scope: 'col', textContent: layer })));
  $('grid').append(top);
  for (let head = 0; head < Math.max(...data.heads); head++) {
    const line = make('tr');
    line.append(make('th', { scope: 'row', textContent: head }));
    data.layers.forEach((_, row) => {
      const i = pairAt(row, head), cell = make('td');
      cell.setAttribute('role', 'gridcell');
      if (i >= 0) {
        cell.className = 'shaded';
        cell.tabIndex = i === 0 ? 0 : -1;
        cell.dataset.pair = i;
        cells[i] = cell;
      }
      line.append(cell);
    });
    $('grid').append(line);
  }
}

let figures = [];
function measure() {
  const last = choices[shown].rows - 1 || 1;
  const total = new Uint16Array(n);
  perLayer.forEach(layer => { for (let i = 0; i < n; i++) total[i] += layer[i]; });
  figures = kept.map(bits => {
    let rows = 0, sum = 0, agreed = 0;
    for (let i = 0; i < n; i++) if (bits[i]) {
      rows++; sum += i;
      if (2 * (total[i] - 1) >= pairs.length - 1) agreed++;
    }
    return { rows, place: rows ? sum / rows / last : 0, agreement: rows ? agreed / rows : 0 };
  });
  shadeGrid();
}

function shadeGrid() {
  const metric = $('metric').value;
  const values = figures.map(figure => figure[metric]);
  const most = metric === 'rows' ? Math.max(...values) : 1;
  const only = chosen.length < pairs.length ? new Set(chosen) : new Set();
  cells.forEach((cell, i) => {
    cell.style.setProperty('--a', (0.6 * values[i] / most).toFixed(3));
    cell.classList.toggle('on', only.has(i));
    const { layer, head } = pairs[i];
    cell.setAttribute('aria-label', `layer ${layer}, head ${head}: ${metric === 'rows' ? number(values[i]) : percent(values[i])}`);
    cell.title = cell.getAttribute('aria-label');
  });
}

function mark() {
  cells.forEach((cell, i) => {
    const text = now >= 0 && kept[i][now] ? '\u25cf' : '';
    if (cell.textContent !== text) cell.textContent = text;
  });
}

function tellPair(i) {
  const { layer, head } = pairs[i], figure = figures[i];
  tell(make('b', { textContent: `Layer ${layer}, KV head ${head}` }), `: keeps ${number(figure.rows)} of ${number(choices[shown].rows)} entries, ` +
    `${percent(figure.agreement)} of them are kept by at least half of the others, mean place ${percent(figure.place)}`);
}

function goCell(i) {
  cells[cellAt].tabIndex = -1;
  cellAt = Math.max(0, Math.min(cells.length - 1, i));
  cells[cellAt].tabIndex = 0;
  cells[cellAt].focus();
}

function goNext(rows, heads) {
  const { row, head } = pairs[cellAt], found = pairAt(row + rows, head + heads);
  if (found >= 0) goCell(found);
}

const chooseCell = () => choose(pairs[cellAt].layer, pairs[cellAt].head);
const gridKeys = {
  ArrowRight: () => goNext(1, 0), ArrowLeft: () => goNext(-1, 0), ArrowDown: () => goNext(0, 1), ArrowUp: () => goNext(0, -1),
  Home: () => goCell(0), End: () => goCell(cells.length - 1),
  Enter: chooseCell, ' ': chooseCell, Escape: () => choose('', ''),
};

// ---- layers and places, on a canvas

const GUTTER = 30;
const map = { row: 0, bin: 0, bins: 1, step: 1, active: false };
const rowHeight = Math.max(4, Math.min(16, Math.floor(260 / Math.max(1, data.layers.length))));
const edge = bin => Math.floor(bin * n / map.bins);

function share(row, bin) {
  let sum = 0;
  for (let i = edge(bin); i < edge(bin + 1); i++) sum += perLayer[row][i];
  return sum / ((edge(bin + 1) - edge(bin)) * data.heads[row]);
}

const base = document.createElement('canvas'); // the map without the mark of where the keyboard is

function draw(light = false) {
  const canvas = $('depth'), style = getComputedStyle(document.documentElement);
  const width = Math.max(100, canvas.clientWidth), height = rowHeight * data.layers.length;
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = height + 'px';
  canvas.width = base.width = width * scale;
  canvas.height = base.height = height * scale;
  const pen = base.getContext('2d');
  pen.scale(scale, scale);
  const shade = light ? '9 105 218' : style.getPropertyValue('--shade');
  const ink = light ? '#000000' : style.getPropertyValue('--ink');
  map.bins = Math.max(1, Math.min(n, Math.floor((width - GUTTER) / 2)));
  map.bin = Math.min(map.bin, map.bins - 1);
  map.step = (width - GUTTER) / map.bins;
  pen.fillStyle = `rgb(${shade})`;
  data.layers.forEach((_, row) => {
    for (let bin = 0; bin < map.bins; bin++) {
      pen.globalAlpha = Math.sqrt(share(row, bin));
      if (pen.globalAlpha) pen.fillRect(GUTTER + bin * map.step, row * rowHeight, map.step + 0.3, rowHeight - 0.5);
    }
  });
  pen.globalAlpha = 1;
  pen.fillStyle = ink;
  pen.font = '10px sans-serif';
  pen.textBaseline = 'middle';
  const every = Math.ceil(12 / rowHeight);
  data.layers.forEach((layer, row) => { if (row % every === 0) pen.fillText(layer, 4, Math.max(6, (row + 0.5) * rowHeight)); });
  pen.fillRect(GUTTER + data.nPrompt / n * (width - GUTTER), 0, 1, height);
  drawMark(!light);
}

function drawMark(marked) {
  const pen = $('depth').getContext('2d');
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, base.width, base.height);
  pen.drawImage(base, 0, 0);
  if (!map.active || !marked) return;
  const scale = window.devicePixelRatio || 1;
  pen.scale(scale, scale);
  pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue('--focus');
  pen.lineWidth = 1.5;
  pen.strokeRect(GUTTER + map.bin * map.step - 2, map.row * rowHeight + 1, map.step + 4, rowHeight - 2);
}

function goMap(row, bin) {
  map.active = true;
  map.row = Math.max(0, Math.min(data.layers.length - 1, row));
  map.bin = Math.max(0, Math.min(map.bins - 1, bin));
  drawMark(true);
  const from = edge(map.bin), to = edge(map.bin + 1);
  tell(make('b', { textContent: `Layer ${data.layers[map.row]}, tokens ${number(from + 1)} to ${number(to)}` }),
    `: ${percent(share(map.row, map.bin))} of its heads' entries are kept: `, make('code', { textContent: quoted(from, from + 24) }));
}

function mapAt(event) {
  const box = $('depth').getBoundingClientRect();
  const x = (event.clientX - box.left - GUTTER) / (box.width - GUTTER), y = (event.clientY - box.top) / box.height;
  goMap(Math.floor(y * data.layers.length), Math.floor(x * map.bins));
}

const toText = () => { $('text').focus({ preventScroll: true }); point(edge(map.bin), true); };
const mapKeys = {
  ArrowRight: () => goMap(map.row, map.bin + 1), ArrowLeft: () => goMap(map.row, map.bin - 1),
  ArrowDown: () => goMap(map.row + 1, map.bin), ArrowUp: () => goMap(map.row - 1, map.bin),
  PageDown: () => goMap(map.row, map.bin + 20), PageUp: () => goMap(map.row, map.bin - 20),
  Home: () => goMap(map.row, 0), End: () => goMap(map.row, map.bins - 1), Enter: toText,
};

// ---- controls

function legend() {
  const all = chosen.length;
  const shares = all === 1 ? [0, 1] : [0, 1 / 16, 1 / 4, 9 / 16, 1];
  const texts = shares.map(share => all === 1 ? (share ? 'kept' : 'not kept') : String(Math.round(share * all)));
  $('legend').replaceChildren(...shares.map((share, i) => {
    const swatch = make('span', { textContent: texts[i] });
    swatch.style.setProperty('--a', opacity(share));
    return swatch;
  }).filter((_, i) => texts.indexOf(texts[i]) === i));
  $('legend').setAttribute('aria-label', `Shading: ${texts.join(', ')} of ${all} pairs`);
}

function tellChoice() {
  const choice = choices[shown];
  let text = choice.number === 0 ? 'the eviction' : `selection ${choice.number}, after ${choice.rows - data.nPrompt} entries of the answer`;
  if (shown > 0) {
    const [more, less] = [came, left].map(array => array.reduce((a, b) => a + b, 0));
    text += `: ${number(more)} entries came, ${number(less)} left, of ${number(counts.reduce((a, b) => a + b, 0))}`;
  }
  $('choice-text').textContent = text;
  $('choice').setAttribute('aria-valuetext', text);
}

function update() {
  const layer = $('layer').value, head = $('head').value;
  chosen = pairs.map((_, i) => i).filter(i => (layer === '' || pairs[i].layer === +layer) && (head === '' || pairs[i].head === +head));
  count(); legend(); tellChoice(); shadeGrid();
  blocks.forEach(paint);
  if (now >= 0) { mark(); tellToken(now); }
}

function choose(layer, head) {
  $('layer').value = layer; $('head').value = head;
  update();
}

function chooseChoice() {
  showChoice(+$('choice').value);
  measure(); update(); draw();
}

// ---- start

function start() {
  const fill = (select, name, values) => select.append(
    new Option(name, ''), ...values.map(value => new Option(value, value)));
  fill($('layer'), 'all', data.layers);
  fill($('head'), 'all', [...Array(Math.max(...data.heads)).keys()]);
  $('choice').max = choices.length - 1;
  $('choice').value = choices.length - 1;
  $('choice-label').hidden = $('choice-text').hidden = $('moved-label').hidden = choices.length < 2;
  buildGrid();
  chooseChoice();

  $('layer').addEventListener('change', () => { if (!chosenExists()) $('head').value = ''; update(); });
  $('head').addEventListener('change', () => { if (!chosenExists()) $('layer').value = ''; update(); });
  const chosenExists = () => pairs.some(pair => [String(pair.layer), ''].includes($('layer').value) && [String(pair.head), ''].includes($('head').value));
  $('choice').addEventListener('input', chooseChoice);
  $('metric').addEventListener('change', shadeGrid);
  $('moved').addEventListener('change', () => blocks.forEach(paint));

  const keys = (element, table, act) => element.addEventListener('keydown', event => {
    if (!plain(event) || !Object.hasOwn(table, event.key)) return;
    event.preventDefault();
    act(table[event.key]);
  });
  keys($('text'), textKeys, key => point(key(), true));
  keys($('grid'), gridKeys, key => key());
  keys($('depth'), mapKeys, key => key());

  $('text').addEventListener('focus', () => { if (now < 0) point(0, false); else tellToken(now); });
  // a page that scrolls below a mouse at rest must not move what the keyboard is at
  let mouse = '';
  $('text').addEventListener('pointermove', event => {
    const place = `${event.clientX} ${event.clientY}`, span = event.target.closest('span[data-i]');
    if (place === mouse || !span) return;
    mouse = place;
    if (+span.dataset.i !== now) point(+span.dataset.i, false);
  });
  const cellOf = event => event.target.closest('td[data-pair]');
  $('grid').addEventListener('pointerover', event => { if (cellOf(event)) tellPair(+cellOf(event).dataset.pair); });
  $('grid').addEventListener('focusin', event => { if (cellOf(event)) tellPair(cellAt = +cellOf(event).dataset.pair); });
  $('grid').addEventListener('click', event => { if (cellOf(event)) { goCell(+cellOf(event).dataset.pair); gridKeys.Enter(); } });
  $('depth').addEventListener('pointermove', mapAt);
  $('depth').addEventListener('click', event => { mapAt(event); toText(); });
  $('depth').addEventListener('focus', () => goMap(map.row, map.bin));
  $('depth').addEventListener('blur', () => { map.active = false; drawMark(true); });
  new ResizeObserver(() => draw()).observe($('depth').parentElement);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => draw());
  addEventListener('beforeprint', () => { blocks.forEach(block => enliven(block, true)); draw(true); });
  addEventListener('afterprint', () => draw());
}

if (cut) start();
