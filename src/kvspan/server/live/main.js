// The page's spine: gets the feed, keeps a minute of figures, and hands both to those who draw.
import { drawLine } from "./line.js";
import { Ranks } from "./ranks.js";
import { showRequests } from "./requests.js";
import { startChat } from "./chat.js";

const $ = (id) => document.getElementById(id);
const KEPT = 240; // looks: a minute at four a second
const SHORTEST = 40;
const AGAIN_MS = 1500;
const history = { output: [], prompt: [], ttft: [], tpot: [], kv: [] };
const ranks = new Ranks($("ranks"), $("tip"), light);
let before = null;

function light(request) {
  ranks.light(request);
  for (const row of $("requests").children) {
    row.classList.toggle("lit", row.dataset.request === String(request));
  }
}

function key() {
  return sessionStorage.getItem("kvspan-key");
}

function headers(more = {}) {
  return key() ? { ...more, Authorization: `Bearer ${key()}` } : more;
}

function askForKey() {
  $("key-form").hidden = false;
  $("key-input").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("kvspan-key", $("key-input").value);
  $("key-form").hidden = true;
});

// An EventSource could not carry the key, so the stream is read by hand.
async function follow() {
  const reply = await fetch("live/feed", { headers: headers() });
  if (reply.status === 401) {
    askForKey();
    throw new Error("it asks for its API key");
  }
  if (!reply.ok) throw new Error(`it answers ${reply.status}`);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("it has hung up");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    const last = events.findLast((event) => event.startsWith("data: "));
    if (last) show(JSON.parse(last.slice(6)));
  }
}

async function forEver() {
  for (;;) {
    try {
      await follow();
    } catch (error) {
      state("gone", `no server: ${error.message}`);
      before = null;
    }
    await new Promise((resume) => setTimeout(resume, AGAIN_MS));
  }
}

function state(kind, text) {
  $("state").className = `state ${kind}`;
  $("state").querySelector("span").textContent = text;
}

function show(now) {
  if (now.ready) state("ready", now.num_requests ? `${now.num_requests} running or waiting` : "ready");
  else state(now.gone ? "gone" : "wait", now.why || "not ready");
  $("model").textContent = now.model;
  showLayout(now);
  keep(now);
  drawCards(now);
  ranks.show(now);
  showRequests(now, $("requests"), $("requests-count"), $("requests-none"), light);
  before = now;
  document.body.dataset.looks = Number(document.body.dataset.looks || 0) + 1;
}

function showLayout({ layout, ranks }) {
  const chips = [`${ranks.length} ${ranks.length > 1 ? "ranks" : "rank"}`];
  if (layout.num_replicas > 1) chips.push(`${layout.num_replicas} replicas`);
  chips.push(`TP ${layout.tp_size}`, `DCP ${layout.dcp_size}`);
  if (layout.pcp_size > 1) chips.push(`PCP ${layout.pcp_size}`);
  chips.push(`blocks of ${layout.block_size}`, `${layout.kv_dtype} cache`, `${count(layout.max_model_len)} tokens`);
  $("layout").replaceChildren(...chips.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
}

function keep(now) {
  const span = before ? now.at - before.at : 0;
  const rate = (name) => (span > 0 ? Math.max(now.stats[name] - before.stats[name], 0) / span : null);
  const mean = (name) => {
    const number = before ? now[name].count - before[name].count : 0;
    return number > 0 ? ((now[name].sum - before[name].sum) / number) * 1000 : null;
  };
  const blocks = now.pools.reduce((sum, pool) => sum + pool.num_blocks, 0);
  const used = now.pools.reduce((sum, pool) => sum + pool.num_used, 0);
  push(history.output, rate("output_tokens"));
  push(history.prompt, rate("prompt_tokens"));
  push(history.ttft, mean("ttft"));
  push(history.tpot, mean("tpot"));
  push(history.kv, blocks ? (100 * used) / blocks : null);
}

function push(list, value) {
  list.push(value);
  if (list.length > KEPT) list.shift();
}

function smooth(list, width) {
  return list.map((_, i) => {
    const near = list.slice(Math.max(0, i - width + 1), i + 1).filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}

function drawCards(now) {
  const output = smooth(history.output, 4);
  const prompt = smooth(history.prompt, 4);
  const total = now.stats.prompt_tokens;
  const hit = total ? Math.round((100 * now.stats.cached_tokens) / total) : 0;
  card("output", output, count(output.at(-1)), "tok/s out", `${count(prompt.at(-1))} tok/s of prompts`);
  const tpot = smooth(history.tpot, 8);
  card("ttft", history.ttft, ...duration(latest(history.ttft)), `${now.ttft.count} requests so far`);
  card("tpot", tpot, ...duration(latest(tpot)), `${count(now.stats.output_tokens)} tokens so far`);
  const some = (number, what) => (number ? `, ${number} ${what}` : "");
  const left = some(now.stats.preemptions, "preempted") + some(now.stats.spills, "spilled");
  const aside = `${hit}% prefix hits${left}`;
  card("kv", history.kv, latest(history.kv)?.toFixed(1) ?? "–", "% in use", aside, 100);
}

function card(name, values, figure, unit, aside, top) {
  const node = $(`card-${name}`);
  node.querySelector("b").textContent = figure;
  node.querySelector(".figure span").textContent = unit;
  node.querySelector(".aside").textContent = aside;
  const length = Math.max(values.length, SHORTEST); // at first a few seconds fill the line, later a minute
  drawLine(node.querySelector("svg"), values, { length, top });
}

const latest = (list) => list.findLast((value) => value !== null);
const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const duration = (ms) => {
  if (ms === undefined) return ["–", "ms"];
  if (ms < 10) return [ms.toFixed(1), "ms"];
  return ms < 2000 ? [count(ms), "ms"] : [(ms / 1000).toFixed(1), "s"];
};

startChat({ log: $("chat-log"), form: $("chat-form"), input: $("chat-input"), send: $("chat-send"), clear: $("chat-clear"), headers, askForKey });
forEver();
