// The whole page.

/** Minimum width in pixels at which the panel is beside the list. The style sheet has the same number. */
const BESIDE = 1100;

/** Return the facts of a tensor that the parts of the page use. */
function tensorOf(given, order) {
  const side = given.sides[0] || given.sides[1],
    at = given.sides[0] ? 0 : 1,
    layout = DATA.sides[at].layouts[side.layout];
  const looks = given.sides.map((one) => one && one.look).filter(Boolean);
  const broken = looks.reduce((sum, look) => sum + look.stats[1] + look.stats[2], 0);
  const status = !TWO ? null : statusOf(given);
  const change = given.difference
    ? given.difference.unequal
      ? asNumber(given.difference.rel_norm)
      : 0
    : status === 'equal'
      ? 0
      : null;
  return {
    name: given.name,
    lower: given.name.toLowerCase(),
    order,
    sides: given.sides,
    layout,
    dtype: layout.dtype,
    shape: layout.shape,
    nbytes: layout.nbytes,
    elements: layout.shape.reduce((a, b) => a * b, 1),
    stats: looks.length ? statsOf(looks[0]) : {},
    broken,
    status,
    change,
    weight: change === null ? -1 : Number.isNaN(change) ? Infinity : change,
    difference: given.difference || null,
  };
}

function statusOf(given) {
  if (given.value) return 'differs';
  if (!given.sides[0] || !given.sides[1]) return given.sides[0] ? 'A' : 'B';
  if (given.difference) {
    const { unequal, beyond_rounding, dtypes } = given.difference;
    if (dtypes[0] === dtypes[1]) return unequal ? 'changed' : 'equal';
    return beyond_rounding ? 'changed' : 'rounded';
  }
  if (given.equal === undefined) return 'differs';
  return given.equal === null ? 'unknown' : given.equal ? 'equal' : 'changed';
}

/** Return the table of the entries that are not tensors. */
function entryTable() {
  if (!DATA.entries.length) return null;
  const order = (entry) => (TWO && (entry.changed || entry.sides.includes(null)) ? 0 : 1);
  const entries = [...DATA.entries].sort((a, b) => order(a) - order(b));
  const shown = 200,
    body = el('tbody', {}, ...entries.slice(0, shown).map(entryRow));
  const more =
    entries.length > shown
      ? el(
          'button',
          {
            type: 'button',
            class: 'more',
            onclick: () => {
              body.append(...entries.slice(shown).map(entryRow));
              more.remove();
            },
          },
          `Show ${countText(entries.length - shown)} more`,
        )
      : null;
  return section(
    'Values',
    'Entries that are no tensors. What is kept as bytes is not read, and nothing is unpickled.',
    el(
      'table',
      { class: 'entries' },
      tableHead('Name', 'Type', ...(TWO ? SIDE_NAMES.map((name, i) => el('th', {}, sideLabel(i))) : ['Value'])),
      body,
    ),
    more,
  );
}

function entryRow(entry) {
  const types = [
    ...new Set(
      entry.sides
        .filter(Boolean)
        .map((side) => (side.encoding ? `${side.encoding}${side.type ? ` (${side.type})` : ''}` : side.type)),
    ),
  ];
  const differs = TWO && (entry.changed || entry.sides.includes(null));
  return el(
    'tr',
    { class: differs ? 'differs' : null },
    el('td', { class: 'mono' }, breakable(visible(entry.name))),
    el('td', {}, visible(types.join(' / '))),
    ...entry.sides.map((side) => el('td', { class: 'mono' }, valueCell(side))),
  );
}

function valueCell(side) {
  if (!side) return el('span', { class: 'note' }, 'not there');
  if (side.tensor) return el('span', { class: 'note' }, side.tensor);
  if (side.encoding) return el('span', { class: 'note' }, `${bytesText(side.nbytes)}, not read`);
  const text = visible(side.text.replaceAll('\n', '\u0001')).replaceAll('\\u0001', '\n');
  const rest = side.cut ? `\n\u2026 and ${countText(side.cut)} more characters` : '';
  if (text.length <= 160 && !text.includes('\n')) return text + rest;
  return el(
    'details',
    {},
    el('summary', {}, `${text.slice(0, 160).replace(/\s+/g, ' ')}\u2026`),
    el('pre', {}, text + rest),
  );
}

/** Texts below the headings. */
const NOTES = {
  sizes: 'Areas are bytes. A click or Enter opens a group, Escape leaves it; a tensor is shown below.',
  layout: 'Select one to see its chunks.',
  one: 'Those with NaN or inf come first. Select one to see its values and chunks.',
  two: 'What changed most comes first. Grey is A, the line is B.',
};

function masthead() {
  const part = DATA.sides.some((side) => side.part) ? ' of a part' : '';
  return el('div', { class: 'masthead' }, el('span', { class: 'brand' }, el('b', {}, 'zarrckpt'), ` report${part}`));
}

/** The page. The panel beside the list shows the selected tensor. */
class Page {
  constructor(tensors) {
    this.tensors = tensors;
    this.selected = null;
    const select = (tensor, reveal) => this.select(tensor, reveal);
    this.panel = el('aside', { class: 'detail', 'aria-label': 'The selected tensor', 'aria-live': 'polite' });
    this.map = new TreeMap(tensors, select);
    this.table = new TensorTable(tensors, select);
    const split = el('div', { class: 'split' }, this.table.element, this.panel);
    const footer = `Made by zarrckpt ${DATA.zarrckpt}. Everything on this page is in this file.`;
    document
      .getElementById('page')
      .append(
        masthead(),
        overview(tensors),
        tensors.length ? alarm(tensors, select) : '',
        tensors.length ? section('Sizes', NOTES.sizes, this.map.element) : '',
        section('Tensors', NOTES[DATA.values ? (TWO ? 'two' : 'one') : 'layout'], split),
        entryTable() || '',
        el('footer', {}, footer),
        tip,
      );
    this.map.draw();
    this.table.update();
    this.select(innerWidth >= BESIDE ? [...tensors].sort(byImportance)[0] : null);
    this.listen();
  }

  listen() {
    addEventListener('resize', () => {
      this.map.draw();
      this.table.draw();
    });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.redraw());
    document.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') hideTip();
    });
  }

  /** Show a tensor. Scroll to its panel always, or if the panel is not beside the list ('narrow'), or never. */
  select(tensor, reveal) {
    this.selected = tensor;
    this.panel.classList.toggle('open', Boolean(tensor));
    this.drawPanel();
    this.panel.scrollTop = 0;
    this.table.show(tensor);
    if (tensor && (reveal === 'always' || (reveal === 'narrow' && innerWidth < BESIDE))) {
      this.panel.scrollIntoView({ block: 'start', behavior: 'smooth' });
    }
  }

  drawPanel() {
    const hint = 'Select a tensor to see its values and chunks.';
    const shown = this.selected && detail(this.selected, () => this.select(null));
    this.panel.hidden = !this.tensors.length;
    this.panel.replaceChildren(shown || el('p', { class: 'empty' }, hint));
  }

  redraw() {
    themeColours.clear();
    this.map.draw();
    this.drawPanel();
  }
}

new Page(DATA.tensors.map(tensorOf));
