// The panel of one tensor, which is built when the tensor is selected.

const STAT_NAMES = ['count', 'nan', 'inf', 'zeros', 'min', 'max', 'mean', 'std', 'norm'];

/** Return the statistics of one side as a mapping. */
function statsOf(look) {
  return Object.fromEntries(STAT_NAMES.map((name, i) => [name, look.stats[i]]));
}

function brokenText(tensor) {
  const some = tensor.sides
    .map((side, i) => [side, i])
    .filter(([side]) => side && side.look)
    .map(([side, i]) => {
      const { nan, inf, count } = statsOf(side.look);
      const parts = [nan ? `${countText(nan)} NaN` : null, inf ? `${countText(inf)} inf` : null].filter(Boolean);
      return parts.length ? `${TWO ? `${SIDE_NAMES[i]}: ` : ''}${parts.join(', ')} of ${countText(count)}` : null;
    })
    .filter(Boolean);
  return some.join('; ');
}

function changeText(tensor) {
  return tensor.change === null ? '\u2013' : tensor.change === 0 ? 'nothing' : numberText(tensor.change, 3);
}

const STATUS_TEXT = {
  changed: 'changed',
  equal: 'equal bit for bit',
  rounded: 'only rounded to another dtype',
  differs: 'other kind, shape or dtype',
  A: 'only in A',
  B: 'only in B',
  unknown: 'not compared',
};

/** Return the panel of one tensor. */
function detail(tensor, close) {
  const known = tensor.sides.map((side, i) => [side, i]).filter(([side]) => side);
  const looks = tensor.sides.map((side) => side && side.look);
  return el(
    'div',
    { class: 'detail-body' },
    el(
      'div',
      { class: 'detail-head' },
      el('h3', { class: 'mono' }, breakable(visible(tensor.name))),
      el('button', { type: 'button', class: 'close', 'aria-label': 'Close', onclick: close }, '\u00d7'),
    ),
    tensor.broken
      ? el('p', { class: 'flag' }, brokenText(tensor), ...looks.map((look, i) => firstBroken(look, i)))
      : null,
    chips(tensor, known),
    TWO ? changes(tensor) : null,
    looks.some((look) => look && look.histogram) ? histograms(looks) : null,
    numbers(looks),
    outliers(looks),
    ...known.map(([side, i]) => chunkSection(DATA.sides[i], side, i)),
  );
}

/** Allow line breaks after the dots of a name. */
function breakable(text) {
  return text.split('.').flatMap((part, i) => (i ? ['.', el('wbr'), part] : [part]));
}

function firstBroken(look, i) {
  return look && look.first_broken
    ? el('small', {}, `${TWO ? `${SIDE_NAMES[i]}: ` : ''}one is at [${look.first_broken.join(', ')}]`)
    : null;
}

function chips(tensor, known) {
  const texts = known.map(([side, i]) => {
    const layout = DATA.sides[i].layouts[side.layout];
    const dtype = `${layout.dtype}${layout.portable ? ' (stored as unsigned integers)' : ''}`;
    return [dtype, shapeText(layout.shape), bytesText(layout.nbytes)].join('  \u00b7  ');
  });
  const same = new Set(texts).size === 1;
  return el(
    'p',
    { class: 'chips' },
    ...(same
      ? [texts[0]]
      : texts.map((text, i) =>
          el('span', {}, sideLabel(known[i][1]), text),
        )),
  );
}

/** Return a table of the differences between the sides. */
function changes(tensor) {
  const found = tensor.difference;
  if (!found) return el('p', { class: 'chips' }, STATUS_TEXT[tensor.status]);
  const rows = [
    ['relative change', numberText(found.rel_norm), 'norm of the difference over the norm of A'],
    ['greatest difference', exactText(found.max_abs), 'absolute, of one element'],
    ['at', found.max_abs_at && `[${found.max_abs_at.join(', ')}]`, 'the first element with this difference'],
    ['greatest relative', numberText(found.max_rel), 'of one element'],
    ['cosine', cosineText(found.cosine), '1 where both point the same way'],
    ['new NaN', found.new_nan && countText(found.new_nan), 'elements that are NaN in B alone'],
    ['gone NaN', found.gone_nan && countText(found.gone_nan), 'elements that are NaN in A alone'],
    ['common NaN', found.common_nan && countText(found.common_nan), 'elements that are NaN in A and B'],
  ].filter(([, text]) => text);
  const share = (count) => `${countText(count)} (${shareText(count, found.count)})`;
  const body = el(
    'tbody',
    {},
    ...rows.map(([name, text, note]) => headedRow(name, [text], { title: note })),
    headedRow('elements that differ', [share(found.unequal)]),
    found.not_finite
      ? headedRow('of these NaN or inf', [countText(found.not_finite)], { title: 'left out of the differences above' })
      : null,
    found.dtypes[0] === found.dtypes[1]
      ? null
      : headedRow('by more than rounding', [share(found.beyond_rounding)], {
          title: `what a cast between ${found.dtypes.join(' and ')} does not explain`,
        }),
  );
  return block('Change from A to B', el('table', { class: 'numbers' }, body));
}

/** Return a titled part of the panel. */
function block(title, ...children) {
  return el('div', { class: 'block' }, el('h4', {}, title), ...children);
}

function cosineText(value) {
  return value === null ? '\u2013' : value.toFixed(6).replace('-', '\u2212');
}

function histograms(looks) {
  const options = { log: false, full: false },
    some = looks.filter((look) => look && look.histogram);
  const place = el('div', {}),
    cut = el('p', { class: 'note' });
  const constant = some.every((look) => statsOf(look).min === statsOf(look).max);
  const shown = looks.map((look) => (look && look.histogram ? look : null));
  if (constant)
    return block(
      'Distribution',
      el(
        'p',
        { class: 'note' },
        `All finite elements are ${[...new Set(some.map((look) => exactText(statsOf(look).min)))].join(' and ')}.`,
      ),
    );
  const draw = () => {
    place.replaceChildren(histogramChart(shown, options));
    const hidden = options.full ? [] : some.filter((look) => look.bulk).map((look) => look.bulk);
    const [below, above] = [3, 4].map((at) => hidden.reduce((sum, bulk) => sum + bulk[at], 0));
    cut.textContent = hidden.length
      ? `The middle of the values; ${countText(below)} below and ${countText(above)} above are not in the picture.`
      : '';
  };
  const toggles = el(
    'div',
    { class: 'toggles' },
    toggle('log counts', (on) => {
      options.log = on;
      draw();
    }),
    some.some((look) => look.bulk)
      ? toggle('full range', (on) => {
          options.full = on;
          draw();
        })
      : null,
  );
  draw();
  return el('div', { class: 'block' }, el('div', { class: 'row' }, el('h4', {}, 'Distribution'), toggles), place, cut);
}

function toggle(text, change) {
  const button = el(
    'button',
    {
      type: 'button',
      class: 'toggle',
      'aria-pressed': 'false',
      onclick: () => {
        const on = button.getAttribute('aria-pressed') !== 'true';
        button.setAttribute('aria-pressed', String(on));
        change(on);
      },
    },
    text,
  );
  return button;
}

function numbers(looks) {
  const some = looks.map((look, i) => [look, i]).filter(([look]) => look);
  if (!some.length) return null;
  const rows = [
    ['min', 'min'],
    ['mean', 'mean'],
    ['max', 'max'],
    ['std', 'std. deviation'],
    ['norm', 'norm'],
  ];
  const found = some.map(([look]) => statsOf(look));
  const counts = [
    ['zeros', (stats) => `${countText(stats.zeros)} (${shareText(stats.zeros, stats.count)})`],
    ['NaN', (stats) => countText(stats.nan)],
    ['inf', (stats) => countText(stats.inf)],
  ];
  const cell = (stats, name, text) =>
    el('td', { class: name !== 'zeros' && stats[name.toLowerCase()] ? 'bad' : null }, text(stats));
  const body = el(
    'tbody',
    {},
    ...rows.map(([name, text]) =>
      headedRow(
        text,
        found.map((stats) => exactText(stats[name], 6)),
      ),
    ),
    ...counts.map(([name, text]) =>
      headedRow(
        name,
        found.map((stats) => cell(stats, name, text)),
      ),
    ),
  );
  const heads = some.length > 1 ? tableHead('', ...some.map(([, i]) => el('th', {}, sideLabel(i)))) : null;
  return block('Numbers', el('table', { class: 'numbers' }, heads, body));
}

function outliers(looks) {
  const blocks = looks
    .map((look, i) => {
      if (!look || !look.low || !look.low.length) return null;
      const { count } = statsOf(look);
      if (look.low[0][2] === null) return null;
      const sigma = el('th', { title: 'Standard deviations from the mean' }, '\u03c3');
      const heads = tableHead('', 'value', 'at', sigma);
      const group = (title, list) =>
        el(
          'tbody',
          {},
          ...list.map(([value, at, sigmas], place) =>
            headedRow(place ? '' : title, [
              exactText(value),
              el('td', { class: 'at' }, `[${at.join(', ')}]`),
              el('td', { class: Math.abs(sigmas) >= 6 ? 'warn' : null }, minus(sigmas.toFixed(1))),
            ]),
          ),
        );
      return [
        TWO ? sideLabel(i) : null,
        el('table', { class: 'numbers extremes' }, heads, group('lowest', look.low), group('highest', look.high)),
        look.beyond
          ? el(
              'p',
              { class: 'note' },
              `${plural(look.beyond, 'element')} (${shareText(look.beyond, count)}) further than 6\u03c3 from the mean`,
            )
          : null,
      ];
    })
    .filter(Boolean)
    .flat();
  return blocks.length ? block('Extremes', ...blocks.filter(Boolean)) : null;
}

function chunkSection(side, shown, i) {
  const layout = side.layouts[shown.layout],
    ranks = side.info.world_size;
  const note = [
    plural(layout.chunks, 'chunk'),
    `of ${shapeText(layout.chunk)}`,
    layout.subchunk ? `subchunks of ${shapeText(layout.subchunk)}` : null,
    layout.compression,
  ];
  const plane = chunkPlane(layout);
  return el(
    'div',
    { class: 'block' },
    el('h4', {}, TWO ? sideLabel(i) : null, 'Chunks'),
    el('p', { class: 'note' }, note.filter(Boolean).join(', ')),
    layout.chunks ? chunkPicture(layout, ranks, shown.look && shown.look.broken) : null,
    plane.panels > MAX_PANELS
      ? el('p', { class: 'note' }, `the first ${MAX_PANELS} of ${countText(plane.panels)} planes`)
      : null,
    layout.chunks ? rankLegend(layout, ranks) : null,
  );
}
