// Functions that all parts of the page use: elements, texts of numbers, colours, the tooltip.
// Names and values come from the checkpoint, so they become text and never markup.

const DATA = JSON.parse(document.getElementById('data').textContent);
const TWO = DATA.sides.length === 2;
const SIDE_NAMES = ['A', 'B'];

/** Return an element. Properties are on* handlers, a mapping for style, and attributes. Children are nodes or texts. */
function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Return an SVG element. */
function svg(tag, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.flat().filter(Boolean));
  return made;
}

// -- texts of numbers

const UNITS = ['B', 'KB', 'MB', 'GB', 'TB', 'PB'];

/** Return a number of bytes with three digits, as on the command line. */
function bytesText(nbytes) {
  let amount = nbytes,
    unit = 0;
  while (amount >= 999.5 && unit + 1 < UNITS.length) {
    amount /= 1000;
    unit += 1;
  }
  return unit ? `${Number(amount.toPrecision(3))} ${UNITS[unit]}` : `${nbytes} B`;
}

function countText(count) {
  return Math.round(count).toLocaleString('en-US');
}

/** Return 8,030,261,248 as 8.03 billion. */
function largeText(count) {
  for (const [size, word] of [
    [1e12, 'trillion'],
    [1e9, 'billion'],
    [1e6, 'million'],
  ]) {
    if (count >= 0.9995 * size) return `${Number((count / size).toPrecision(3))} ${word}`;
  }
  return countText(count);
}

function minus(text) {
  return text.replaceAll('-', '\u2212');
}

/** Parse a number of the data: null is NaN, texts are infinities and integers of more than 53 bits. */
function asNumber(value) {
  if (value === null || value === undefined) return NaN;
  return typeof value === 'string' ? Number(value.replace('inf', 'Infinity')) : value;
}

/** Return an integer in full, or another number with at most `digits` digits. */
function exactText(value, digits = 5) {
  const whole = typeof value === 'string' ? !value.endsWith('inf') : Number.isSafeInteger(value);
  return whole ? minus(BigInt(value).toLocaleString('en-US')) : numberText(value, digits);
}

/** Return a number with at most `digits` digits. */
function numberText(value, digits = 5) {
  const number = asNumber(value);
  if (Number.isNaN(number)) return '\u2013';
  if (!Number.isFinite(number)) return number > 0 ? '\u221e' : '\u2212\u221e';
  if (number === 0) return '0';
  const size = Math.abs(number);
  if (Number.isInteger(number) && size < 1e9) return minus(countText(number));
  if (size >= 1e6 || size < 1e-3)
    return minus(
      number
        .toExponential(digits - 2)
        .replace(/\.?0+e/, 'e')
        .replace('e+', 'e'),
    );
  return minus(String(Number(number.toPrecision(digits))));
}

function shareText(part, whole) {
  if (!whole) return '\u2013';
  const percent = (100 * part) / whole;
  if (part && percent < 0.01) return '< 0.01%';
  if (part < whole && percent > 99.99) return '> 99.99%';
  return `${Number(percent.toPrecision(percent > 99 ? 4 : 3))}%`;
}

function shapeText(shape) {
  return shape.length ? shape.map(countText).join(' \u00d7 ') : 'scalar';
}

function plural(count, word, text = countText) {
  return `${text(count)} ${word}${count === 1 ? '' : 's'}`;
}

/** Escape characters that are invisible or change the direction of text, so that no name looks like another. */
function visible(text) {
  return text.replace(
    /[\u0000-\u001f\u007f-\u009f\u2028\u2029\u2800\ufff9-\ufffb\ud800-\udfff\p{Default_Ignorable_Code_Point}]/gu,
    (char) => `\\u${char.codePointAt(0).toString(16).padStart(4, '0')}`,
  );
}

// -- colours

const themeColours = new Map();

/** Return a colour of the theme. It is cached until the theme changes. */
function themed(name) {
  if (!themeColours.has(name))
    themeColours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return themeColours.get(name);
}

const CATEGORIES = 8;
function categoryColour(number) {
  return themed(`--c${number % CATEGORIES}`);
}

const VIRIDIS = [
  [72, 53, 129],
  [52, 96, 141],
  [33, 145, 140],
  [76, 194, 108],
  [194, 223, 63],
  [253, 231, 37],
];

/** Return the colour of a rank: one of eight, or a colour on a scale if there are more ranks. */
function rankColour(rank, ranks) {
  if (ranks <= CATEGORIES) return categoryColour(rank);
  const at = (rank / Math.max(ranks - 1, 1)) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const mixed = VIRIDIS[low].map((part, i) => Math.round(part + (VIRIDIS[low + 1][i] - part) * (at - low)));
  return `rgb(${mixed.join(' ')})`;
}

// -- the tooltip

const tip = el('div', { class: 'tip', role: 'tooltip', hidden: true });

/** Show a title and rows of text beside a point. */
function showTip(x, y, title, rows) {
  tip.replaceChildren(el('b', {}, title), ...rows.map((row) => el('div', {}, row)));
  tip.hidden = false;
  const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
  const top = y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${Math.max(top, 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

/** Return a section of the page with a heading. */
function section(title, note, ...children) {
  return el(
    'section',
    {},
    el('div', { class: 'heading' }, el('h2', {}, title), note ? el('p', {}, note) : null),
    ...children,
  );
}

/** Return the label of side 0 (A) or 1 (B). */
function sideLabel(i) {
  return el('span', { class: `side side${i}` }, SIDE_NAMES[i]);
}

/** Return the head of a table. Cells are nodes or texts. */
function tableHead(...cells) {
  return el('thead', {}, el('tr', {}, ...cells.map((cell) => (cell instanceof Node ? cell : el('th', {}, cell)))));
}

/** Return a row of a table that begins with a heading. Cells are nodes or texts. */
function headedRow(name, cells, properties = {}) {
  const rest = cells.map((cell) => (cell instanceof Node ? cell : el('td', {}, cell)));
  return el('tr', properties, el('th', { scope: 'row' }, name), ...rest);
}

/** Return buttons of which one is selected. A click calls `change` with the button's name. */
function choice(label, options, chosen, change) {
  const buttons = options.map(([name, text, count]) =>
    el(
      'button',
      {
        type: 'button',
        'aria-pressed': String(name === chosen),
        'data-name': name,
        onclick: () => {
          mark(name);
          change(name);
        },
      },
      text,
      count === undefined ? null : el('span', { class: 'count' }, countText(count)),
    ),
  );
  function mark(name) {
    for (const button of buttons) button.setAttribute('aria-pressed', String(button.dataset.name === name));
  }
  return el('div', { class: 'choice', role: 'group', 'aria-label': label }, buttons);
}
