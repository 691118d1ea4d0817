// A line of figures over the last minute, newest at the right. Gaps where nothing was measured are bridged.
const WIDTH = 240;
const HEIGHT = 44;

export function drawLine(svg, values, { length, top }) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  const known = values.map((value, i) => [i, value]).filter(([, value]) => value !== null);
  if (!known.length) {
    svg.replaceChildren();
    return;
  }
  const high = top ?? Math.max(...known.map(([, value]) => value), 1e-9) * 1.08;
  const x = (i) => ((i + length - values.length) / (length - 1)) * WIDTH;
  const y = (value) => HEIGHT - 1 - (Math.min(value, high) / high) * (HEIGHT - 3);
  const points = known.map(([i, value]) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  points.push(`${WIDTH},${y(known.at(-1)[1]).toFixed(1)}`);
  const line = `M${points.join("L")}`;
  const area = `${line}L${WIDTH},${HEIGHT}L${x(known[0][0]).toFixed(1)},${HEIGHT}Z`;
  svg.replaceChildren(path(area, "area"), path(line, ""));
}

function path(d, name) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "path");
  node.setAttribute("d", d);
  node.setAttribute("class", name);
  return node;
}
