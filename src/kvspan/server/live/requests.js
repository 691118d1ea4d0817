// Running requests: how far each is, and how its blocks span the ranks.
import { hueOf, nameOf } from "./ranks.js";

const SHOWN = 12;

export function showRequests(now, list, counter, none, light) {
  const running = now.requests.filter((request) => request.running).length;
  counter.textContent = now.num_requests ? `${running} running, ${now.num_requests - running} waiting` : "";
  none.hidden = now.num_requests > 0;
  const shown = now.requests.slice(0, SHOWN);
  const kept = new Map([...list.children].map((row) => [row.dataset.request, row]));
  list.replaceChildren(
    ...shown.map((request) => {
      const row = kept.get(String(request.request_id)) ?? newRow(request, light);
      fill(row, request, now);
      return row;
    }),
  );
}

function newRow(request, light) {
  const row = document.createElement("li");
  row.dataset.request = request.request_id;
  row.style.setProperty("--hue", hueOf(request.request_id));
  row.innerHTML = `<div class="request-head"><i></i><b></b><span class="sizes"></span><span class="phase"></span></div>
    <div class="bar"><i class="done"></i><i class="hit"></i></div><div class="span"></div>`;
  row.addEventListener("pointerenter", () => light(request.request_id));
  row.addEventListener("pointerleave", () => light(null));
  return row;
}

function fill(row, request, now) {
  const prompt = request.num_prompt_tokens.toLocaleString("en");
  const output = request.num_output_tokens.toLocaleString("en");
  row.querySelector("b").textContent = `#${request.request_id}`;
  row.querySelector(".sizes").textContent = `${prompt} in, ${output} out`;
  row.querySelector(".phase").textContent = phase(request) + span(request, now);
  const share = (tokens) => `${Math.min(100, (100 * tokens) / request.num_prompt_tokens)}%`;
  row.querySelector(".done").style.width = share(request.num_computed_tokens);
  row.querySelector(".hit").style.width = share(request.num_cached_tokens);
  const spread = request.blocks_by_pool.map((blocks, pool) => [pool, blocks]).filter(([, blocks]) => blocks);
  row.querySelector(".span").replaceChildren(
    ...spread.map(([pool, blocks]) => {
      const part = document.createElement("span");
      const holders = now.ranks.filter((rank) => rank.pool === pool);
      const names = holders.map((rank, i) => (i ? rank.rank : nameOf(rank, now.layout))).join(", ");
      part.style.setProperty("--share", blocks);
      part.textContent = `${names} · ${blocks}`;
      part.title = `${blocks} blocks on ${names}`;
      return part;
    }),
  );
}

// What its tokens lie on; one rank alone, or a layout without homes, needs no word.
function span(request, now) {
  const held = request.blocks_by_pool.map((blocks, pool) => [pool, blocks]).filter(([, blocks]) => blocks);
  if (!held.length || now.layout.dcp_size === 1) return "";
  const ranks = now.ranks.filter((rank) => held.some(([pool]) => rank.pool === pool));
  if (!request.is_local) return `, on ${ranks.length} rank${ranks.length > 1 ? "s" : ""}`;
  return `, local to ${ranks.map((rank, i) => (i ? rank.rank : nameOf(rank, now.layout))).join(", ")}`;
}

function phase(request) {
  const again = request.num_preemptions ? `, preempted ${request.num_preemptions}×` : "";
  if (!request.running) return `waiting${again}`;
  if (request.num_computed_tokens < request.num_prompt_tokens) {
    return `prefill ${Math.floor((100 * request.num_computed_tokens) / request.num_prompt_tokens)}%${again}`;
  }
  return `decoding${again}`;
}
