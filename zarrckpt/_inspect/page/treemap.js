// A tree map of sizes: areas are bytes, levels are parts of names. A click or Enter opens a group.

const MIN_SIDE = 26;
const MAX_CELLS = 1500;

/** Return the tree of names, split at dots. A node has name, path, bytes, parent, and children (a Map) or a tensor. */
function treeOf(tensors) {
  const root = { name: '', path: '', bytes: 0, children: new Map(), parent: null, tensors: 0, broken: 0 };
  for (const tensor of tensors) {
    let node = root;
    const parts = tensor.name.split('.');
    parts.forEach((part, depth) => {
      const key = depth === parts.length - 1 ? `\u0000${part}` : part;
      if (!node.children.has(key)) {
        const path = node.path ? `${node.path}.${part}` : part;
        node.children.set(key, {
          name: part,
          path,
          bytes: 0,
          children: new Map(),
          parent: node,
          tensors: 0,
          broken: 0,
        });
      }
      node = node.children.get(key);
    });
    node.tensor = tensor;
    for (let up = node; up; up = up.parent) {
      up.bytes += tensor.nbytes;
      up.tensors += 1;
      up.broken += tensor.broken ? 1 : 0;
    }
  }
  joinChains(root);
  return root;
}

/** Join each group that has only one child with the child: layers.0 instead of layers and 0. */
function joinChains(node) {
  for (const [key, child] of node.children) {
    let only = child;
    while (only.children.size === 1 && !only.tensor) {
      const [inner] = only.children.values();
      inner.name = `${only.name}.${inner.name}`;
      only = inner;
    }
    only.parent = node;
    if (only !== child) node.children.set(key, only);
    joinChains(only);
  }
}

/** Return almost square boxes of items in a rectangle, largest first: [item, x, y, w, h]. Areas are item.bytes. */
function squarified(items, x, y, w, h) {
  const placed = [],
    rest = items.filter((item) => item.bytes > 0).sort((a, b) => b.bytes - a.bytes);
  let left = rest.reduce((sum, item) => sum + item.bytes, 0),
    at = 0;
  while (at < rest.length && w > 0 && h > 0) {
    const side = Math.min(w, h),
      scale = (w * h) / left;
    let row = 0,
      count = 0,
      worst = Infinity;
    while (at + count < rest.length) {
      const next = row + rest[at + count].bytes,
        thick = (next * scale) / side;
      const ratio = Math.max(
        ...[rest[at], rest[at + count]].map((item) => {
          const long = (item.bytes * scale) / thick;
          return Math.max(long / thick, thick / long);
        }),
      );
      if (ratio > worst) break;
      worst = ratio;
      row = next;
      count += 1;
    }
    const thick = (row * scale) / side;
    let along = 0;
    for (const item of rest.slice(at, at + count)) {
      const long = (item.bytes * scale) / thick;
      placed.push(w >= h ? [item, x, y + along, thick, long] : [item, x + along, y, long, thick]);
      along += long;
    }
    if (w >= h) {
      x += thick;
      w -= thick;
    } else {
      y += thick;
      h -= thick;
    }
    left -= row;
    at += count;
  }
  return placed;
}

/** The tree map. Call draw() after a change of size or theme. */
class TreeMap {
  constructor(tensors, select) {
    this.root = this.shown = treeOf(tensors);
    this.select = select;
    this.dtypes = [...new Set(tensors.map((tensor) => tensor.dtype))];
    this.way = TWO && DATA.values ? 'change' : 'group';
    this.cursor = 0;
    this.map = el('div', { class: 'map', onkeydown: (event) => this.onKey(event), onmouseleave: hideTip });
    this.crumbs = el('nav', { class: 'crumbs', 'aria-label': 'Where the tree map is' });
    this.legend = el('p', { class: 'legend' });
    const ways = [['group', 'Group'], ['dtype', 'Data type'], ...(TWO ? [['change', 'Change']] : [])];
    const colours = choice('Colours of the tree map', ways, this.way, (name) => {
      this.way = name;
      this.draw();
    });
    this.element = el('div', {}, el('div', { class: 'bar' }, this.crumbs, colours), this.map, this.legend);
  }

  draw() {
    this.cells = 0;
    this.map.replaceChildren();
    const found = squarified([...this.shown.children.values()], 0, 0, this.map.clientWidth, this.map.clientHeight);
    found.forEach(([node, ...box], number) => {
      const cell = this.drawNode(this.map, node, box, found.length > 1 ? number : null);
      this.makeReachable(cell, node, number === Math.min(this.cursor, found.length - 1));
    });
    if (!found.length) this.map.append(el('p', { class: 'empty' }, 'Nothing here has a size.'));
    this.drawCrumbs();
    this.drawLegend();
  }

  /** Draw a node and its children into `parent`. If `hue` is null, the children get different hues. */
  drawNode(parent, node, [x, y, w, h], hue) {
    this.cells += 1;
    const open = node.children.size > 0 && w > 2 * MIN_SIDE && h > 2 * MIN_SIDE && this.cells < MAX_CELLS;
    const cell = el('div', { class: `cell ${open ? 'group' : 'leaf'}${node.broken && !open ? ' broken' : ''}` });
    Object.assign(cell.style, { left: `${x}px`, top: `${y}px`, width: `${w - 1}px`, height: `${h - 1}px` });
    if (w > 34 && h > 15) cell.append(labelOf(node, w, h, open));
    this.listen(cell, node);
    parent.append(cell);
    if (open) this.drawInside(cell, node, w, h, hue);
    else this.colour(cell, node, hue);
    return cell;
  }

  drawInside(cell, node, w, h, hue) {
    const several = node.children.size > 1;
    squarified([...node.children.values()], 3, 19, w - 7, h - 23).forEach(([child, ...box], number) => {
      const seen = box[2] >= 1.5 && box[3] >= 1.5;
      if (seen) this.drawNode(cell, child, box, hue ?? (several ? number : null));
    });
  }

  listen(cell, node) {
    cell.addEventListener('mousemove', (event) => {
      event.stopPropagation();
      showTip(event.clientX, event.clientY, ...this.tipOf(node));
    });
    cell.addEventListener('click', (event) => {
      event.stopPropagation();
      this.enter(node);
    });
  }

  /** Make the map one stop of the Tab key, which arrow keys move. */
  makeReachable(cell, node, first) {
    cell.setAttribute('role', 'button');
    cell.setAttribute('aria-label', `${visible(node.path)}, ${bytesText(node.bytes)}`);
    cell.tabIndex = first ? 0 : -1;
    cell.addEventListener('focus', () => {
      const box = cell.getBoundingClientRect();
      if (cell.matches(':focus-visible')) showTip(box.left, box.top + 16, ...this.tipOf(node));
    });
  }

  tipOf(node) {
    const rows = [`${bytesText(node.bytes)}, ${shareText(node.bytes, this.root.bytes)} of all`];
    if (node.tensor) {
      rows.unshift(`${node.tensor.dtype}  ${shapeText(node.tensor.shape)}`);
      if (node.tensor.broken) rows.push(brokenText(node.tensor));
      if (node.tensor.change !== null) rows.push(`changed by ${changeText(node.tensor)}`);
    } else {
      rows.unshift(plural(node.tensors, 'tensor'));
      if (node.broken) rows.push(`NaN or inf in ${plural(node.broken, 'tensor')}`);
    }
    return [visible(node.path), rows];
  }

  colour(cell, node, hue) {
    let [fill, ink] = [categoryColour(hue ?? 0), themed('--on-fill')];
    if (this.way === 'dtype') fill = categoryColour(this.dtypes.indexOf(firstTensor(node).dtype));
    if (this.way === 'change') [fill, ink] = changeColours(node);
    cell.style.setProperty('--fill', fill);
    cell.style.setProperty('color', ink);
  }

  /** Open a group, or show a tensor. */
  enter(node) {
    if (node.tensor && !node.children.size) this.select(node.tensor, 'always');
    else this.go(node);
  }

  leave() {
    const from = this.shown;
    if (!from.parent) return;
    const ordered = [...from.parent.children.values()].filter((node) => node.bytes > 0);
    ordered.sort((a, b) => b.bytes - a.bytes);
    this.go(from.parent, Math.max(ordered.indexOf(from), 0));
  }

  go(node, cursor = 0) {
    Object.assign(this, { shown: node, cursor });
    hideTip();
    this.draw();
    this.map.querySelector('[tabindex="0"]')?.focus({ preventScroll: true });
  }

  onKey(event) {
    const tops = [...this.map.children];
    const here = tops.indexOf(document.activeElement);
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (here < 0) return;
    if (event.key === 'Enter' || event.key === ' ') tops[here].click();
    else if (event.key === 'Escape' || event.key === 'Backspace') this.leave();
    else if (event.key in steps) {
      this.cursor = Math.max(0, Math.min(tops.length - 1, here + steps[event.key]));
      for (const [i, cell] of tops.entries()) cell.tabIndex = i === this.cursor ? 0 : -1;
      tops[this.cursor].focus({ preventScroll: true });
    } else return;
    event.preventDefault();
  }

  drawCrumbs() {
    const path = [];
    for (let node = this.shown; node; node = node.parent) path.unshift(node);
    const parts = path.map((node, i) => {
      const name = i ? visible(node.name) : 'everything';
      if (node === this.shown) return [el('b', {}, name)];
      return [
        el('button', { type: 'button', onclick: () => this.go(node) }, name),
        el('span', { 'aria-hidden': 'true' }, '\u203a'),
      ];
    });
    const size = `${plural(this.shown.tensors, 'tensor')}, ${bytesText(this.shown.bytes)}`;
    this.crumbs.replaceChildren(...parts.flat(), el('span', { class: 'note' }, size));
  }

  drawLegend() {
    const key = (colour, text) => el('span', { class: 'key' }, patch(colour), text);
    const keys = [];
    if (this.way === 'dtype') keys.push(...this.dtypes.map((name, i) => key(categoryColour(i), name)));
    if (this.way === 'change') {
      const steps = [0, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1];
      keys.push('relative change', ...steps.map((step) => key(changeColour(step), step ? numberText(step) : 'none')));
      keys.push(key(themed('--differs'), 'not comparable'));
    }
    if (this.root.broken) keys.push(el('span', { class: 'key' }, el('i', { class: 'patch broken' }), 'NaN or inf'));
    this.legend.replaceChildren(...keys);
    this.legend.hidden = !keys.length;
  }
}

function labelOf(node, w, h, open) {
  const size = open ? w > 120 : h > 32 && w > 52;
  const name = el('b', {}, visible(node.name));
  return el('span', { class: 'label' }, name, size ? el('small', {}, bytesText(node.bytes)) : null);
}

function firstTensor(node) {
  return node.tensor || firstTensor(node.children.values().next().value);
}

/** Return the colours of a node's area and text by its change. */
function changeColours(node) {
  const [change, differs] = changeOf(node);
  if (differs) return [themed('--differs'), themed('--on-fill')];
  return [changeColour(change), themed(change && changeShare(change) > 0.45 ? '--on-change2' : '--on-change1')];
}

/** Return the mean change below a node, weighted by bytes, and whether nothing there can be compared. */
function changeOf(node) {
  const { tensor } = node;
  if (tensor) return [Math.max(0, Math.min(tensor.weight, 1)), !['changed', 'rounded', 'equal'].includes(tensor.status)];
  const parts = [...node.children.values()].map((child) => [child.bytes, ...changeOf(child)]);
  const sum = parts.reduce((total, [bytes, change]) => total + bytes * change, 0);
  return [sum / Math.max(node.bytes, 1), parts.every((part) => part[2])];
}

/** Return the colour of a relative change, on a logarithmic scale from 0 to 1. */
function changeColour(change) {
  return change
    ? `color-mix(in oklab, ${themed('--change2')} ${Math.round(100 * changeShare(change))}%, ${themed('--change1')})`
    : themed('--change0');
}

/** Return the position of a change on the scale: 0 up to a millionth, 1 from one on. */
function changeShare(change) {
  return Number.isFinite(change) ? Math.max(0, Math.min(1, 1 + Math.log10(change) / 6)) : 1;
}
