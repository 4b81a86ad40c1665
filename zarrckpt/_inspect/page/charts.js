// Histograms. One is [exponent, first, counts]: counts[i] numbers from first + i to first + i + 1, times 2 ** exponent.

/** Return a histogram with coarser bins. */
function coarser(histogram, exponent) {
  let [at, first, counts] = histogram;
  while (at < exponent) {
    const start = Math.floor(first / 2),
      joined = new Array(Math.floor((first + counts.length - 1) / 2) - start + 1).fill(0);
    counts.forEach((count, i) => {
      joined[Math.floor((first + i) / 2) - start] += count;
    });
    first = start;
    counts = joined;
    at += 1;
  }
  return [at, first, counts];
}

/** Return histograms with bins of equal width. */
function alike(histograms) {
  const exponent = Math.max(...histograms.map((one) => one[0]));
  return histograms.map((one) => coarser(one, exponent));
}

/** Return a small histogram for a row of the table. */
function sparkline(looks, width = 116, height = 22) {
  const shown = looks.map((look) => look && (look.bulk || look.histogram));
  const found = alike(shown.filter(Boolean));
  const image = svg('svg', {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    class: 'sparkline',
    'aria-hidden': 'true',
  });
  if (!found.length) return image;
  const begin = Math.min(...found.map((one) => one[1])),
    end = Math.max(...found.map((one) => one[1] + one[2].length));
  const step = Math.min(width / (end - begin), 14),
    left = (width - step * (end - begin)) / 2;
  let place = 0;
  shown.forEach((look, side) => {
    if (!look) return;
    const [, first, counts] = found[place++];
    const most = Math.max(...counts);
    const heights = counts.map((count) => (count ? Math.max(1, ((height - 1) * count) / most) : 0));
    image.append(
      svg('path', {
        d: outline(heights, left + (first - begin) * step, step, height),
        class: `side${side} ${TWO ? 'two' : 'one'}`,
      }),
    );
  });
  return image;
}

/** Return the path of the outline of adjacent columns. */
function outline(heights, left, step, bottom) {
  const points = [`M${left.toFixed(2)} ${bottom}`];
  heights.forEach((height, i) => {
    points.push(`V${(bottom - height).toFixed(2)}H${(left + (i + 1) * step).toFixed(2)}`);
  });
  return `${points.join('')}V${bottom}Z`;
}

/** Return about `most` round numbers from low to high. */
function ticks(low, high, most) {
  const rough = (high - low) / most,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high * (1 + 1e-12) && found.length < 20; i += 1) found.push(i * step);
  return found;
}

/** Return a histogram with axes for one side or two. Options: logarithmic counts, the full range. */
function histogramChart(looks, options) {
  const [width, height, left, right, top, bottom] = [400, 172, 8, 8, 10, 26];
  const some = looks.filter(Boolean);
  const full = options.full || !some.some((look) => look.bulk);
  const found = alike(some.map((look) => (full ? look.histogram : look.bulk || look.histogram)));
  const scale = 2 ** found[0][0];
  const begin = Math.min(...found.map((one) => one[1])),
    end = Math.max(...found.map((one) => one[1] + one[2].length));
  const [inside, tall] = [width - left - right, height - top - bottom];
  const x = (place) => left + (inside * (place - begin)) / (end - begin);
  const total = found.map((one) => one[2].reduce((a, b) => a + b, 0));
  const image = svg('svg', {
    viewBox: `0 0 ${width} ${height}`,
    class: 'histogram',
    role: 'img',
    'aria-label': 'Histogram of the values',
  });
  for (const share of [0.25, 0.5, 0.75, 1]) {
    image.append(
      svg('line', {
        x1: left,
        x2: width - right,
        y1: top + tall * (1 - share),
        y2: top + tall * (1 - share),
        class: 'grid',
      }),
    );
  }
  const most = Math.max(...found.map((one, i) => Math.max(...one[2]) / total[i]));
  const least = Math.min(...found.map((one, i) => 1 / total[i]));
  const columnHeight = (share) => {
    if (!share) return 0;
    return Math.max(
      1,
      tall * (options.log ? (1 + Math.log10(share / least)) / (1 + Math.log10(most / least)) : share / most),
    );
  };
  found.forEach(([, first, counts], i) => {
    const heights = counts.map((count) => columnHeight(count / total[i]));
    const side = looks.indexOf(some[i]);
    const path = svg('path', {
      d: outline(heights, x(first), inside / (end - begin), height - bottom),
      class: `side${side} ${TWO ? 'two' : 'one'}`,
    });
    image.append(path);
  });
  image.append(...axis(begin * scale, end * scale, (value) => x(value / scale), height - bottom, width));
  const hover = svg('rect', { x: left, y: top, width: inside, height: tall, class: 'hover' });
  hover.addEventListener('mousemove', (event) => {
    const box = hover.getBoundingClientRect();
    const place = Math.min(begin + Math.floor(((event.clientX - box.left) / box.width) * (end - begin)), end - 1);
    const rows = found.map(([, first, counts], i) => {
      const count = counts[place - first] || 0;
      const side = TWO ? `${SIDE_NAMES[looks.indexOf(some[i])]}: ` : '';
      return `${side}${plural(count, 'element')}, ${shareText(count, total[i])}`;
    });
    showTip(event.clientX, event.clientY, `${numberText(place * scale)} to ${numberText((place + 1) * scale)}`, rows);
  });
  hover.addEventListener('mouseleave', hideTip);
  image.append(hover);
  return image;
}

function axis(low, high, x, y, width) {
  const made = [svg('line', { x1: x(low), x2: x(high), y1: y, y2: y, class: 'axis' })];
  for (const value of ticks(low, high, 5)) {
    const at = x(value),
      anchor = at < 24 ? 'start' : at > width - 24 ? 'end' : 'middle';
    const text = svg('text', { x: at, y: y + 16, 'text-anchor': anchor });
    text.textContent = numberText(Math.abs(value) < (high - low) * 1e-9 ? 0 : value, 4);
    made.push(svg('line', { x1: at, x2: at, y1: y, y2: y + 4, class: 'axis' }), text);
  }
  return made;
}
