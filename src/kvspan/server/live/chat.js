// A small chat over /v1/chat/completions, streamed. What comes from the model is text and never markup.
export function startChat({ log, form, input, send, clear, headers, askForKey }) {
  let messages = [];
  let running = null;

  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  input.addEventListener("input", () => {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight + 2}px`;
  });
  clear.addEventListener("click", () => {
    running?.abort();
    messages = [];
    log.replaceChildren();
    clear.hidden = true;
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) {
      running.abort();
      return;
    }
    messages.push({ role: "user", content: input.value });
    line("user", input.value);
    input.value = "";
    input.style.height = "auto";
    clear.hidden = false;
    running = new AbortController();
    send.textContent = "Stop";
    try {
      await answer(running.signal);
    } catch (error) {
      if (error.name !== "AbortError") line("error", error.message);
    }
    running = null;
    send.textContent = "Send";
  });

  async function answer(signal) {
    const started = performance.now();
    const reply = await fetch("v1/chat/completions", {
      method: "POST",
      signal,
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({ messages, stream: true, stream_options: { include_usage: true } }),
    });
    if (reply.status === 401) askForKey();
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    let [thought, said, first, usage] = [null, null, null, null];
    const spoken = { role: "assistant", content: "" };
    try {
      for await (const chunk of chunks(reply)) {
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const delta = chunk.choices[0]?.delta ?? {};
        if (delta.content || delta.reasoning_content) first ??= performance.now();
        if (delta.reasoning_content) (thought ??= line("thought", "")).append(delta.reasoning_content);
        if (delta.content) {
          (said ??= line("assistant", "")).append(delta.content);
          spoken.content += delta.content;
        }
        log.scrollTop = log.scrollHeight;
      }
    } finally {
      messages.push(spoken);
    }
    if (usage && first) note(usage, first - started, performance.now() - first);
  }

  async function* chunks(reply) {
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ") && event !== "data: [DONE]") yield JSON.parse(event.slice(6));
      }
    }
  }

  function note(usage, firstMs, restMs) {
    const small = document.createElement("small");
    const rate = usage.completion_tokens > 1 ? (1000 * (usage.completion_tokens - 1)) / restMs : null;
    const hit = usage.prompt_tokens_details?.cached_tokens;
    small.textContent = [
      `${usage.prompt_tokens.toLocaleString("en")} in${hit ? ` (${hit} cached)` : ""}, ${usage.completion_tokens} out`,
      `first token after ${Math.round(firstMs)} ms`,
      ...(rate ? [`${rate.toFixed(0)} tok/s`] : []),
    ].join(" · ");
    log.append(small);
    log.scrollTop = log.scrollHeight;
  }

  function line(kind, text) {
    const node = document.createElement("p");
    node.className = kind;
    node.append(text);
    log.append(node);
    log.scrollTop = log.scrollHeight;
    return node;
  }
}
