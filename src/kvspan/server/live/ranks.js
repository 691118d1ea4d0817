// The rank grid: a group a replica, a tile a rank, a cell a block (or several, in large pools), a colour
// a request.
const FREE = -2;
const CACHED = -1;
const HEIGHT = 132; // of a tile's blocks, about
const [SMALLEST, LARGEST] = [3, 16]; // pixels of a cell

export function hueOf(request) {
  const lightness = getComputedStyle(document.documentElement).getPropertyValue("--used-l");
  return `oklch(${lightness} 0.14 ${(250 + request * 137.508) % 360})`; // golden angle: neighbours differ
}

export const nameOf = (rank, layout) =>
  layout.num_replicas > 1 ? `replica ${rank.replica}, rank ${rank.rank}` : `rank ${rank.rank}`;

export class Ranks {
  constructor(root, tip, onLight) {
    [this.root, this.tip, this.onLight] = [root, tip, onLight];
    this.tiles = [];
    this.groups = [];
    this.lit = null;
    this.now = null;
    new ResizeObserver(() => this.now && this.draw()).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.now && this.draw());
  }

  show(now) {
    this.now = now;
    if (this.tiles.length !== now.ranks.length) this.build(now);
    this.draw();
  }

  light(request) {
    if (this.lit === request) return;
    this.lit = request;
    if (this.now) this.draw();
  }

  build({ ranks, layout }) {
    this.tiles = ranks.map((rank) => {
      const tile = document.createElement("article");
      tile.className = "rank";
      const head = document.createElement("div");
      const name = document.createElement("b");
      name.textContent = `rank ${rank.rank}`;
      const figures = document.createElement("span");
      head.append(name, figures);
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      canvas.addEventListener("pointermove", (event) => this.point(event, rank, canvas));
      canvas.addEventListener("pointerleave", () => this.leave());
      tile.append(head, canvas);
      return { tile, canvas, figures, rank };
    });
    this.groups = Array.from({ length: layout.num_replicas }, (_, replica) => {
      const group = document.createElement("section");
      group.className = "replica";
      const title = document.createElement("h3");
      const why = document.createElement("span");
      title.append(`replica ${replica} `, why);
      const tiles = document.createElement("div");
      tiles.className = "tiles";
      tiles.append(...this.tiles.filter((each) => each.rank.replica === replica).map((each) => each.tile));
      group.append(title, tiles);
      return { group, why };
    });
    this.root.classList.toggle("several", layout.num_replicas > 1);
    this.root.replaceChildren(...this.groups.map((each) => each.group));
  }

  draw() {
    const style = getComputedStyle(document.documentElement);
    this.groups.forEach(({ group, why }, replica) => {
      const { ready, why: sentence } = this.now.replicas[replica];
      why.textContent = ready ? "" : sentence;
      group.classList.toggle("lost", !ready);
    });
    const tones = { free: style.getPropertyValue("--free"), cached: style.getPropertyValue("--cached") };
    for (const { canvas, figures, rank } of this.tiles) {
      const pool = this.now.pools[rank.pool];
      if (!pool) continue;
      const used = `${pool.num_used} of ${pool.num_blocks.toLocaleString("en")} blocks`;
      figures.textContent = pool.num_cached ? `${used}, ${pool.num_cached.toLocaleString("en")} cached` : used;
      canvas.setAttribute("aria-label", `KV blocks of ${nameOf(rank, this.now.layout)}: ${figures.textContent}`);
      this.paint(canvas, pool.cells, tones);
    }
  }

  paint(canvas, cells, tones) {
    const width = canvas.clientWidth;
    const size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt((width * HEIGHT) / cells.length))));
    const columns = Math.max(1, Math.floor(width / size));
    const step = width / columns;
    const rows = Math.ceil(cells.length / columns);
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${Math.round(rows * step)}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(rows * step * ratio);
    canvas.dataset.columns = columns;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const gap = step >= 6 ? 1.5 : 0.75;
    const hues = new Map();
    cells.forEach((cell, i) => {
      if (cell >= 0 && !hues.has(cell)) hues.set(cell, hueOf(cell));
      pen.globalAlpha = this.lit === null || cell === this.lit ? 1 : 0.28;
      pen.fillStyle = cell === FREE ? tones.free : cell === CACHED ? tones.cached : hues.get(cell);
      const [x, y] = [(i % columns) * step, Math.floor(i / columns) * step];
      pen.beginPath();
      pen.roundRect(x, y, step - gap, step - gap, step >= 8 ? 2.5 : 1);
      pen.fill();
    });
  }

  point(event, rank, canvas) {
    const pool = this.now.pools[rank.pool];
    const columns = Number(canvas.dataset.columns);
    const step = canvas.clientWidth / columns;
    const i = Math.floor(event.offsetY / step) * columns + Math.min(Math.floor(event.offsetX / step), columns - 1);
    const cell = pool.cells[i];
    if (cell === undefined) return this.leave();
    const first = i * pool.blocks_per_cell;
    const last = Math.min(first + pool.blocks_per_cell, pool.num_blocks) - 1;
    const where = first === last ? `block ${first}` : `blocks ${first}–${last}`;
    this.tip.textContent = `${nameOf(rank, this.now.layout)}, ${where}\n${this.what(cell)}`;
    this.tip.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - this.tip.offsetWidth - 8);
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
    this.onLight(cell >= 0 ? cell : null);
  }

  what(cell) {
    if (cell === FREE) return "free";
    if (cell === CACHED) return "cached: a prompt that begins so hits it";
    const request = this.now.requests.find((each) => each.request_id === cell);
    if (!request) return `request ${cell}`;
    const tokens = request.num_prompt_tokens + request.num_output_tokens;
    return `request ${cell}, ${tokens.toLocaleString("en")} tokens`;
  }

  leave() {
    this.tip.hidden = true;
    this.onLight(null);
  }
}
