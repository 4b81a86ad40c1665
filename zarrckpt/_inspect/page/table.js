// The list of tensors, filtered and sorted. Only visible rows are built.

const ROW = 32;

/** Return the columns: [key, title, class, width, cell(tensor), sort(tensor) or null]. */
function columnsOf() {
  const name = [
    'name',
    'Name',
    'name',
    null,
    (tensor) =>
      el(
        'div',
        {},
        tensor.broken ? el('span', { class: 'badge' }, badgeText(tensor)) : null,
        el('span', { class: 'fqn' }, el('bdi', {}, visible(tensor.name))),
      ),
    (tensor) => tensor.name,
  ];
  const layout = [
    ['dtype', 'Type', TWO ? 'extra' : 'roomy', 84, (tensor) => tensor.dtype, (tensor) => tensor.dtype],
    ['shape', 'Shape', 'n', 118, (tensor) => shapeText(tensor.shape), (tensor) => tensor.elements],
    ['nbytes', 'Size', 'n', 78, (tensor) => bytesText(tensor.nbytes), (tensor) => tensor.nbytes],
  ];
  const values = [
    'values',
    'Distribution',
    'values',
    134,
    (tensor) => sparkline(tensor.sides.map((side) => side && side.look)),
    null,
  ];
  const stat = (key, title, kind = 'n') => [
    key,
    title,
    kind,
    86,
    (tensor) => el('span', { title: exactText(tensor.stats[key]) }, numberText(tensor.stats[key], 4)),
    (tensor) => asNumber(tensor.stats[key]),
  ];
  if (TWO) {
    const from = (key, title, width, text, kind = 'n') => [
      key,
      title,
      kind,
      width,
      (tensor) => (tensor.difference ? text(tensor.difference[key]) : ''),
      (tensor) => asNumber(tensor.difference && tensor.difference[key]),
    ];
    return [
      name,
      ...layout,
      ...(DATA.values ? [values] : []),
      ['change', 'Relative change', 'n', 158, changeCell, (tensor) => (tensor.weight < 0 ? NaN : tensor.weight)],
      ...(DATA.values
        ? [
            from('max_abs', 'Max. diff.', 86, (value) => numberText(value, 4)),
            from('cosine', 'Cosine', 86, cosineText, 'n extra'),
          ]
        : []),
    ];
  }
  if (!DATA.values)
    return [
      name,
      ...layout,
      ['chunks', 'Chunks', 'n', 84, (tensor) => countText(tensor.layout.chunks), (tensor) => tensor.layout.chunks],
      ['chunk', 'Chunk shape', 'n', 140, (tensor) => shapeText(tensor.layout.chunk), null],
    ];
  return [
    name,
    ...layout,
    values,
    stat('min', 'Min'),
    stat('max', 'Max'),
    stat('mean', 'Mean', 'n extra'),
    stat('std', 'Std', 'n extra'),
    [
      'bad',
      'NaN, inf',
      'n',
      80,
      (tensor) => (tensor.broken ? el('span', { class: 'bad' }, countText(tensor.broken)) : '0'),
      (tensor) => tensor.broken,
    ],
  ];
}

function changeCell(tensor) {
  if (tensor.change === null || !tensor.difference)
    return el('span', { class: `status ${tensor.status}` }, STATUS_TEXT[tensor.status]);
  const share = tensor.weight > 0 ? Math.max(0.03, changeShare(tensor.weight)) : 0;
  const bar = el('span', { class: 'meter' }, el('i', { style: { width: `${100 * share}%` } }));
  return el(
    'div',
    { class: 'change' },
    bar,
    el('span', {}, tensor.difference.unequal ? numberText(tensor.change, 3) : 'equal'),
  );
}

function badgeText(tensor) {
  return tensor.sides.some((side) => side && side.look && side.look.stats[1]) ? 'NaN' : 'inf';
}

/** Return a test of names for a filter: words in any order, or globs. */
function nameFilter(text) {
  const tests = text
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => {
      if (!/[*?]/.test(word)) return (name) => name.includes(word);
      const pattern = new RegExp(
        `^${word
          .replace(/[.+^${}()|[\]\\]/g, '\\$&')
          .replaceAll('*', '.*')
          .replaceAll('?', '.')}$`,
        's',
      );
      return (name) => pattern.test(name);
    });
  return (name) => tests.every((test) => test(name));
}

/** Compare tensors by the default order: NaN and inf first, then the largest changes, then the order of the save. */
function byImportance(one, other) {
  const rank = (tensor) =>
    tensor.broken ? 3 : tensor.status === 'differs' ? 2 : tensor.status === 'A' || tensor.status === 'B' ? 1 : 0;
  return (
    rank(other) - rank(one) || (TWO ? other.weight - one.weight || 0 : 0) || one.order - other.order
  );
}

const BY_STATUS = {
  changed: 'Changed',
  rounded: 'Only rounded',
  equal: 'Equal',
  differs: 'Kind, shape or dtype',
  A: 'Only in A',
  B: 'Only in B',
};
const TEXTS = new Set(['name', 'dtype']);

/** Return the kinds of tensors as options of a choice: [name, text, count]. */
function kindsOf(tensors) {
  const counted = (test) => tensors.filter(test).length;
  const options = [['broken', 'NaN or inf', counted((tensor) => tensor.broken)]];
  for (const [status, text] of Object.entries(BY_STATUS)) {
    options.push([status, text, counted((tensor) => tensor.status === status)]);
  }
  return [['all', 'All', tensors.length], ...options.filter(([, , count]) => count)];
}

/** Return a comparison by a value: texts in natural order, numbers with NaN at the end. */
function comparing(value, down) {
  return (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (typeof a === 'string') return (down ? -1 : 1) * a.localeCompare(b, 'en', { numeric: true });
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
    return (down ? b - a : a - b) || one.order - other.order;
  };
}

/** The list. Call update() when `element` is on the page, draw() after a change of size, show() to select a tensor. */
class TensorTable {
  constructor(tensors, select) {
    Object.assign(this, { tensors, select, columns: columnsOf(), rows: [], first: -1, last: -1 });
    Object.assign(this, { text: '', kind: 'all', sort: null, down: true, selected: null });
    this.input = el('input', {
      type: 'search',
      placeholder: 'Filter names: words, or a glob such as *.bias',
      'aria-label': 'Filter names',
      spellcheck: 'false',
      oninput: () => this.filter({ text: this.input.value }),
    });
    this.found = el('span', { class: 'note', 'aria-live': 'polite' });
    const kinds = kindsOf(tensors);
    this.kinds = kinds.length > 2 ? choice('Which tensors', kinds, 'all', (kind) => this.filter({ kind })) : null;
    this.scroller = el(
      'div',
      {
        class: 'scroller',
        tabindex: '0',
        'aria-label': 'Tensors',
        onscroll: () => this.draw(),
        onkeydown: (event) => this.onKey(event),
      },
      this.table(),
    );
    if (tensors.length < 20) this.scroller.style.height = `${Math.max(tensors.length, 4) * ROW + 37}px`;
    this.element = el('div', {}, el('div', { class: 'bar' }, this.input, this.kinds, this.found), this.scroller);
  }

  /** Return the table, with two empty rows as high as the rows above and below the visible ones. */
  table() {
    this.heads = this.columns.map((column) => this.head(column));
    this.body = el('tbody', {});
    [this.above, this.below] = [0, 1].map(() => el('tbody', { class: 'gap' }, el('tr', {}, el('td', {}))));
    const widths = this.columns.map(([, , kind, width]) =>
      el('col', { class: kind, style: width ? { width: `${width}px` } : {} }),
    );
    const kept = this.columns.filter(([, , kind]) => !/extra|roomy/.test(kind));
    const least = kept.reduce((sum, [, , , width]) => sum + (width || 205), 0);
    const head = el('thead', {}, el('tr', {}, ...this.heads));
    const style = { 'min-width': `${least}px` };
    return el(
      'table',
      { class: 'tensors', style },
      el('colgroup', {}, ...widths),
      head,
      this.above,
      this.body,
      this.below,
    );
  }

  head([key, title, kind, , , sort]) {
    const sign = el('i', { 'aria-hidden': 'true' });
    const inside = sort ? el('button', { type: 'button', onclick: () => this.sortBy(key) }, title, sign) : title;
    return el('th', { class: kind, scope: 'col' }, inside);
  }

  /** Sort at the first click, reverse at the second, and restore the default order at the third. */
  sortBy(key) {
    const down = !TEXTS.has(key);
    if (this.sort !== key) this.filter({ sort: key, down });
    else if (this.down === down) this.filter({ down: !down });
    else this.filter({ sort: null });
  }

  filter(wanted) {
    Object.assign(this, wanted);
    this.update();
  }

  update() {
    const fits = nameFilter(this.text);
    const ofKind = (tensor) => (this.kind === 'broken' ? tensor.broken : tensor.status === this.kind);
    const wanted = (tensor) => fits(tensor.lower) && (this.kind === 'all' || ofKind(tensor));
    const column = this.columns.find(([key]) => key === this.sort);
    this.rows = this.tensors.filter(wanted).sort(column ? comparing(column[5], this.down) : byImportance);
    const order = this.down ? 'descending' : 'ascending';
    this.heads.forEach((head, i) => head.setAttribute('aria-sort', this.columns[i] === column ? order : 'none'));
    const [some, all] = [this.rows.length, this.tensors.length];
    this.found.textContent = some === all ? '' : `${countText(some)} of ${countText(all)}`;
    this.render(...this.range());
  }

  /** Return the range of the visible rows and some more. */
  range() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - 8);
    return [first, Math.min(this.rows.length, first + Math.ceil(this.scroller.clientHeight / ROW) + 18)];
  }

  draw() {
    const [first, last] = this.range();
    if (first !== this.first || last !== this.last) this.render(first, last);
  }

  render(first, last) {
    Object.assign(this, { first, last });
    this.above.rows[0].cells[0].style.height = `${first * ROW}px`;
    this.below.rows[0].cells[0].style.height = `${Math.max(this.rows.length - last, 0) * ROW}px`;
    this.body.replaceChildren(...this.rows.slice(first, last).map((tensor) => this.row(tensor)));
    if (!this.rows.length) this.body.append(this.emptyRow());
  }

  row(tensor) {
    const cells = this.columns.map(([, , kind, , cell]) => el('td', { class: kind }, cell(tensor)));
    cells[0].title = visible(tensor.name);
    const kind = `${tensor.broken ? 'broken' : ''} ${tensor === this.selected ? 'selected' : ''}`;
    return el('tr', { class: kind, onclick: () => this.select(tensor, 'narrow') }, ...cells);
  }

  emptyRow() {
    const text = this.tensors.length ? 'No tensor fits the filter.' : 'There are no tensors.';
    const shown = this.heads.filter((head) => head.offsetWidth).length;
    return el('tr', {}, el('td', { class: 'empty', colspan: Math.max(shown, 1) }, text));
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (!step || event.target !== this.scroller || !this.rows.length) return;
    event.preventDefault();
    const at = this.rows.indexOf(this.selected);
    this.select(this.rows[Math.max(0, Math.min(this.rows.length - 1, at < 0 ? 0 : at + step))]);
  }

  /** Select a tensor and scroll to it. A filter that hides it is removed. */
  show(tensor) {
    this.selected = tensor;
    if (tensor && !this.rows.includes(tensor)) {
      this.input.value = '';
      this.kinds?.querySelector('[data-name="all"]').click();
      this.filter({ text: '', kind: 'all' });
    }
    const top = this.rows.indexOf(tensor) * ROW;
    const room = this.scroller.clientHeight - 2 * ROW;
    if (tensor && (top < this.scroller.scrollTop || top > this.scroller.scrollTop + room)) {
      this.scroller.scrollTop = Math.max(0, top - room / 2);
    }
    this.render(...this.range());
  }
}
