// A picture of a tensor's chunk grid: the rank that wrote each chunk, and the chunks with NaN and inf.

const MAX_PANELS = 36;

/** Return the rank of every chunk in C order, from sequences (first, step, count), or null if the page has none. */
function writersOf(layout) {
  if (!layout.writers) return null;
  const ranks = new Float64Array(layout.chunks);
  let at = 0;
  for (const [first, step, count] of layout.writers) for (let i = 0; i < count; i += 1) ranks[at++] = first + i * step;
  return ranks;
}

/** Return the number of chunks along each dimension. */
function chunkCounts(layout) {
  return layout.shape.map((n, d) => Math.ceil(n / layout.chunk[d]));
}

/** Return the last two dimensions as rows and columns. The dimensions before them count panels. */
function chunkPlane(layout) {
  const rank = layout.shape.length,
    counts = chunkCounts(layout);
  const last = (list, back) => (rank >= back ? list[rank - back] : 1);
  return {
    counts,
    rows: last(layout.shape, 2),
    columns: last(layout.shape, 1),
    rowStep: last(layout.chunk, 2),
    columnStep: last(layout.chunk, 1),
    down: last(counts, 2),
    across: last(counts, 1),
    panels: counts.slice(0, Math.max(rank - 2, 0)).reduce((a, b) => a * b, 1),
  };
}

/** Return the positions of panels and cells, in pixels. */
function chunkFrame(plane, width) {
  const panels = Math.min(plane.panels, MAX_PANELS),
    per = Math.min(panels, panels > 12 ? 9 : 4),
    gap = 8;
  const wide = (width - gap * (per - 1)) / per;
  const most = panels > 1 ? 110 : plane.down * plane.across > 1 ? 220 : 72;
  let panelHeight = (wide * plane.rows) / plane.columns,
    panelWidth = wide;
  if (panelHeight > most) {
    panelHeight = most;
    panelWidth = Math.max((most * plane.columns) / plane.rows, Math.min(48, wide));
  }
  panelHeight = Math.max(panelHeight, 30);
  const lines = Math.ceil(panels / per);
  const origin = (panel) => [(panel % per) * (panelWidth + gap), Math.floor(panel / per) * (panelHeight + gap)];
  return { panels, panelWidth, panelHeight, origin, height: lines * (panelHeight + gap) - gap };
}

/** Return the picture of one side's chunk grid. `broken` has [chunk, number of elements that are NaN or inf]. */
function chunkPicture(layout, ranks, broken) {
  const plane = chunkPlane(layout),
    writers = writersOf(layout),
    odd = new Map(broken || []);
  const width = 396,
    frame = chunkFrame(plane, width),
    dense = window.devicePixelRatio || 1;
  const canvas = el('canvas', {
    class: 'chunks',
    width: Math.ceil(width * dense),
    height: Math.ceil((frame.height + 2) * dense),
    role: 'img',
    'aria-label': `${plural(layout.chunks, 'chunk')} of ${shapeText(layout.chunk)}`,
  });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${frame.height + 2}px`;
  const pen = canvas.getContext('2d');
  pen.scale(dense, dense);
  pen.translate(1, 1);
  const across = (column) =>
    (Math.min(column * plane.columnStep, plane.columns) / plane.columns) * (frame.panelWidth - 2);
  const along = (row) => (Math.min(row * plane.rowStep, plane.rows) / plane.rows) * (frame.panelHeight - 2);
  for (let panel = 0; panel < frame.panels; panel += 1) {
    const [left, top] = frame.origin(panel);
    drawPanel(pen, panel, left, top);
  }
  canvas.addEventListener('mousemove', (event) => {
    const cell = cellAt((event.offsetX * width) / canvas.clientWidth, (event.offsetY * width) / canvas.clientWidth);
    if (cell === null) hideTip();
    else showTip(event.clientX, event.clientY, ...cellText(cell));
  });
  canvas.addEventListener('mouseleave', hideTip);
  return canvas;

  function drawPanel(pen, panel, left, top) {
    const border = themed('--surface'),
      ink = themed('--on-fill'),
      bad = themed('--bad');
    const fine = frame.panelWidth / plane.across < 4 || frame.panelHeight / plane.down < 4;
    for (let row = 0; row < plane.down; row += 1) {
      for (let column = 0; column < plane.across; column += 1) {
        const number = (panel * plane.down + row) * plane.across + column;
        const [x, y] = [left + across(column), top + along(row)];
        const [w, h] = [left + across(column + 1) - x, top + along(row + 1) - y];
        pen.fillStyle = writers ? rankColour(writers[number], ranks) : themed('--line-strong');
        pen.fillRect(x, y, w, h);
        if (odd.has(number)) hatch(pen, x, y, w, h, bad);
        if (!fine) {
          pen.strokeStyle = border;
          pen.lineWidth = 1.5;
          pen.strokeRect(x, y, w, h);
        }
        if (odd.has(number)) {
          pen.strokeStyle = bad;
          pen.lineWidth = 2;
          pen.strokeRect(x + 1, y + 1, Math.max(w - 2, 0), Math.max(h - 2, 0));
        }
        if (writers && w > 22 && h > 15)
          label(
            pen,
            String(writers[number]),
            x + w / 2,
            y + h / 2,
            ranks > CATEGORIES && writers[number] < ranks * 0.55 ? '#fff' : ink,
            odd.has(number),
          );
      }
    }
  }

  function label(pen, text, x, y, colour, boxed) {
    pen.font = '600 11px system-ui, sans-serif';
    pen.textAlign = 'center';
    pen.textBaseline = 'middle';
    if (boxed) {
      pen.fillStyle = themed('--surface');
      pen.fillRect(x - 11, y - 8, 22, 16);
      colour = themed('--bad');
    }
    pen.fillStyle = colour;
    pen.fillText(text, x, y + 0.5);
  }

  function cellAt(x, y) {
    for (let panel = 0; panel < frame.panels; panel += 1) {
      const [left, top] = frame.origin(panel);
      const [right, down] = [(x - 1 - left) / (frame.panelWidth - 2), (y - 1 - top) / (frame.panelHeight - 2)];
      if (right < 0 || right >= 1 || down < 0 || down >= 1) continue;
      const row = Math.floor((down * plane.rows) / plane.rowStep),
        column = Math.floor((right * plane.columns) / plane.columnStep);
      return (panel * plane.down + row) * plane.across + column;
    }
    return null;
  }

  function cellText(number) {
    const index = [];
    for (let d = plane.counts.length - 1, rest = number; d >= 0; d -= 1) {
      index.unshift(rest % plane.counts[d]);
      rest = Math.floor(rest / plane.counts[d]);
    }
    const parts = index.map(
      (i, d) =>
        `${countText(i * layout.chunk[d])}\u2013${countText(Math.min((i + 1) * layout.chunk[d], layout.shape[d]) - 1)}`,
    );
    const rows = [`elements [${parts.join(', ')}]`];
    if (writers) rows.push(`written by rank ${writers[number]}`);
    if (odd.has(number)) rows.push(`${countText(odd.get(number))} NaN or inf`);
    return [`chunk ${index.length ? `(${index.join(', ')})` : ''}`, rows];
  }
}

/** Draw diagonal lines over a cell. */
function hatch(pen, x, y, w, h, colour) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, w, h);
  pen.clip();
  pen.strokeStyle = colour;
  pen.lineWidth = 2;
  for (let at = -h; at < w; at += 7) {
    pen.beginPath();
    pen.moveTo(x + at, y + h);
    pen.lineTo(x + at + h, y);
    pen.stroke();
  }
  pen.restore();
}

/** Return the legend of a picture: a patch for each rank, or a scale. */
function rankLegend(layout, ranks) {
  const writers = writersOf(layout);
  if (!writers) return el('p', { class: 'note' }, 'The order of its writers is too long for this page.');
  const found = [...new Set(writers)].sort((a, b) => a - b);
  if (ranks > CATEGORIES) {
    const text =
      found.length === 1
        ? `rank ${found[0]}`
        : `${plural(found.length, 'rank')}, ${found[0]} to ${found.at(-1)} of ${ranks}`;
    const scale = el(
      'span',
      { class: 'scale' },
      ...Array.from({ length: 24 }, (_, i) => el('i', { style: { background: rankColour(i, 24) } })),
    );
    return el(
      'p',
      { class: 'legend' },
      'written by ',
      text,
      el('span', { class: 'key' }, '0', scale, String(ranks - 1)),
    );
  }
  return el(
    'p',
    { class: 'legend' },
    'written by rank',
    ...found.map((rank) => el('span', { class: 'key' }, patch(rankColour(rank, ranks)), String(rank))),
  );
}

function patch(colour) {
  return el('i', { class: 'patch', style: { background: colour } });
}
