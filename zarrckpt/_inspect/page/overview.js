// The top of the page: facts of the checkpoint, or the differences of two.

function lastPart(url) {
  return url.replace(/\/+$/, '').split('/').pop() || url;
}

function timeText(created) {
  return created ? `${created.slice(0, 10)} ${created.slice(11, 16)} UTC` : '\u2013';
}

function softwareText(software) {
  return Object.entries(software)
    .map(([name, version]) => `${name} ${version}`)
    .join(', ');
}

/** Return the header: name, url and tiles, or a table of two sides. */
function overview(tensors) {
  const infos = DATA.sides.map((side) => side.info);
  document.title = `${infos.map((info) => visible(lastPart(info.url))).join(' \u2192 ')} \u2013 zarrckpt report`;
  return el(
    'header',
    { class: 'overview' },
    el(
      'h1',
      {},
      ...infos
        .flatMap((info, i) => [
          i ? el('span', { class: 'arrow' }, '\u2192') : null,
          TWO ? sideLabel(i) : null,
          visible(lastPart(info.url)),
        ])
        .filter(Boolean),
    ),
    ...(TWO ? [] : [el('p', { class: 'url' }, visible(infos[0].url))]),
    TWO ? comparison(tensors, infos) : tiles(infos[0]),
    TWO
      ? bothFacts(infos)
      : el('div', { class: 'cards' }, dtypesCard(infos[0]), ranksCard(DATA.sides[0]), aboutCard(infos[0])),
  );
}

function tile(name, value, note, kind) {
  return el(
    'div',
    { class: `tile ${kind || ''}` },
    el('span', {}, name),
    el('b', {}, value),
    note ? el('small', {}, note) : null,
  );
}

function tiles(info) {
  return el(
    'div',
    { class: 'tiles' },
    info.step === null ? null : tile('Step', exactText(info.step)),
    tile('Size', bytesText(info.nbytes), `${countText(info.nbytes)} bytes`),
    tile('Tensors', countText(info.tensors), plural(info.elements, 'element', largeText)),
    tile('Values', countText(info.values + info.blobs), info.blobs ? `${countText(info.blobs)} kept as bytes` : null),
    tile('Saved by', plural(info.world_size, 'rank'), timeText(info.created)),
  );
}

/** Return tiles with the results of the comparison. */
function comparison(tensors, infos) {
  const count = (status) => tensors.filter((tensor) => tensor.status === status).length;
  const values = DATA.entries.filter(
    (entry) => (entry.changed || entry.sides.includes(null)) && !entry.sides.some((side) => side && side.tensor),
  ).length;
  return el(
    'div',
    { class: 'tiles' },
    tile('Tensors changed', countText(count('changed')), greatestChange(tensors)),
    tile('Equal bit for bit', countText(count('equal'))),
    count('rounded') ? tile('Only rounded', countText(count('rounded')), 'to another dtype') : null,
    count('unknown') ? tile('Not compared', countText(count('unknown')), 'other chunks, and no values read') : null,
    tile('Other kind, shape or dtype', countText(count('differs'))),
    tile('Only in A', countText(count('A'))),
    tile('Only in B', countText(count('B'))),
    tile('Values that differ', countText(values)),
  );
}

/** Return a text with the largest relative change, and the number of tensors with an infinite or undefined one. */
function greatestChange(tensors) {
  const found = tensors.filter((tensor) => tensor.status === 'changed').map((tensor) => tensor.change);
  const finite = found.filter(Number.isFinite);
  const [infinite, unknown] = [(change) => change === Infinity, Number.isNaN].map((test) => found.filter(test).length);
  const texts = [
    infinite ? `by \u221e from zero in ${plural(infinite, 'tensor')}` : null,
    finite.length ? `by ${numberText(Math.max(...finite), 3)} at most${infinite ? ' in others' : ', relative'}` : null,
    unknown ? `${plural(unknown, 'tensor')} to or from NaN or inf` : null,
  ].filter(Boolean);
  return texts.join('; ') || null;
}

function card(title, ...children) {
  return el('div', { class: 'card' }, el('h3', {}, title), ...children);
}

function dtypesCard(info) {
  const kinds = Object.entries(info.dtypes);
  return card(
    'Data types',
    el(
      'div',
      { class: 'stack', 'aria-hidden': 'true' },
      ...kinds.map(([, part], i) =>
        el('i', { style: { background: `var(--c${i % CATEGORIES})`, 'flex-grow': String(part.nbytes) } }),
      ),
    ),
    el(
      'table',
      { class: 'small' },
      el(
        'tbody',
        {},
        ...kinds.map(([name, part], i) =>
          el(
            'tr',
            {},
            el('td', {}, patch(`var(--c${i % CATEGORIES})`), name),
            el('td', { class: 'n' }, plural(part.tensors, 'tensor')),
            el('td', { class: 'n' }, bytesText(part.nbytes)),
          ),
        ),
      ),
    ),
  );
}

/** Return columns that show the bytes written by each rank. */
function ranksCard(side) {
  const known = side.info.world_size,
    wrote = side.ranks,
    most = Math.max(...wrote.map((pair) => pair[1]), 1);
  const idle = known - wrote.length,
    sum = wrote.reduce((a, pair) => a + pair[1], 0);
  const columns = wrote.slice(0, 512).map(([rank, nbytes]) =>
    el('i', {
      style: {
        height: `${Math.max((100 * nbytes) / most, 1)}%`,
        background: known <= CATEGORIES ? `var(--c${rank % CATEGORIES})` : rankColour(rank, known),
      },
      onmousemove: (event) =>
        showTip(event.clientX, event.clientY, `rank ${rank}`, [
          `wrote ${bytesText(nbytes)}, ${shareText(nbytes, sum)}`,
        ]),
      onmouseleave: hideTip,
    }),
  );
  const least = bytesText(Math.min(...wrote.map((pair) => pair[1])));
  const range =
    wrote.length > 1 && least === bytesText(most)
      ? `${least} by each rank`
      : wrote.length > 1
        ? `${least} to ${bytesText(most)} a rank`
        : `${bytesText(most)} by rank ${wrote.length ? wrote[0][0] : 0}`;
  return card(
    'Written by',
    wrote.length ? el('div', { class: 'columns' }, ...columns) : null,
    el(
      'p',
      { class: 'note' },
      wrote.length ? range : 'nothing',
      wrote.length && idle > 0 ? `; ${plural(idle, 'rank')} wrote nothing` : '',
    ),
  );
}

function storedText(info) {
  const size = info.nbytes_stored === null ? '\u2013' : bytesText(info.nbytes_stored);
  return info.compression.length ? `${size}, compressed by ${info.compression.join(', ')}` : `${size}, not compressed`;
}

function reusedText(info) {
  const { nbytes, objects, save_id } = info.reused;
  const whole = info.nbytes_stored === null ? '' : ` of ${bytesText(info.nbytes_stored)}`;
  return `${bytesText(nbytes)}${whole}, ${plural(objects, 'chunk')}, from save ${save_id}`;
}

function metadataText(info) {
  return Object.entries(info.metadata)
    .map(([name, text]) => `${name} ${text}`)
    .join(', ');
}

/** Return facts of a checkpoint as pairs of name and text. */
function facts(info) {
  return [
    ['saved', `${timeText(info.created)} by ${plural(info.world_size, 'rank')}`],
    ...(metadataText(info) ? [['metadata', metadataText(info)]] : []),
    ['software', softwareText(info.software)],
    ['chunks', `${plural(info.chunks, 'object')}, ${plural(info.subchunks, 'subchunk')}`],
    ['stored', storedText(info)],
    ...(info.reused ? [['reused', reusedText(info)]] : []),
    ['tree', info.tree || 'canonical'],
    ['save id', info.save_id],
    ...(info.run ? [['run', info.run]] : []),
    ...(info.replaced.length ? [['replaced', plural(info.replaced.length, 'save')]] : []),
  ];
}

function aboutCard(info) {
  return card(
    'Layout and origin',
    el(
      'dl',
      {},
      ...facts(info).flatMap(([name, text]) => [
        el('dt', {}, name),
        el('dd', { class: ['save id', 'run', 'tree'].includes(name) ? 'mono' : null }, visible(text)),
      ]),
    ),
  );
}

function bothFacts(infos) {
  const more = (info) => [
    ['url', info.url],
    ['step', info.step === null ? '\u2013' : exactText(info.step)],
    ['size', bytesText(info.nbytes)],
    ['tensors', `${countText(info.tensors)}, ${plural(info.elements, 'element', largeText)}`],
    [
      'data types',
      Object.entries(info.dtypes)
        .map(([name, part]) => `${name} ${bytesText(part.nbytes)}`)
        .join(', ') || '\u2013',
    ],
    ['metadata', metadataText(info) || '\u2013'],
    ...(infos.some((one) => one.run) ? [['run', info.run || '\u2013']] : []),
    ...facts(info).filter(([name]) => !['replaced', 'metadata', 'run'].includes(name)),
  ];
  const [one, other] = infos.map(more);
  const rows = one.map(([name, text], i) =>
    headedRow(
      name,
      [text, other[i][1]].map((cell) => visible(cell)),
      { class: text === other[i][1] ? 'same' : null },
    ),
  );
  const heads = tableHead('', ...SIDE_NAMES.map((name, i) => el('th', {}, sideLabel(i))));
  return el('div', { class: 'card' }, el('table', { class: 'both' }, heads, el('tbody', {}, ...rows)));
}

/** Return a list of the tensors with NaN or inf. */
function alarm(tensors, select) {
  const broken = tensors.filter((tensor) => tensor.broken),
    shown = 8;
  if (!DATA.values)
    return el(
      'p',
      { class: 'notice' },
      'Layout only: no tensor was read for this page, so it says nothing of NaN, inf or values.',
    );
  if (!broken.length)
    return el('p', { class: 'notice fine' }, el('b', {}, 'No NaN, no inf'), ` in ${plural(tensors.length, 'tensor')}.`);
  return el(
    'div',
    { class: 'notice bad', role: 'status' },
    el('p', {}, el('b', {}, `${plural(broken.length, 'tensor')} with NaN or inf`)),
    el(
      'ul',
      {},
      ...broken
        .slice(0, shown)
        .map((tensor) =>
          el(
            'li',
            {},
            el('button', { type: 'button', onclick: () => select(tensor, 'always') }, visible(tensor.name)),
            el('span', {}, brokenText(tensor)),
          ),
        ),
    ),
    broken.length > shown
      ? el(
          'p',
          { class: 'note' },
          `and ${countText(broken.length - shown)} more: they come first in the list of tensors`,
        )
      : null,
  );
}
