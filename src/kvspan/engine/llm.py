"""The offline API: `LLM(model).generate(prompts)`. Names are those that users of the field know."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvspan.clock import WallClock
from kvspan.config.engine import EngineConfig
from kvspan.config.resolved import Resolved
from kvspan.engine.build import build_engine
from kvspan.engine.generation import Generation, Piece, Prompt
from kvspan.errors import RequestError
from kvspan.loading.tokenizer import Tokenizer
from kvspan.request import RequestOutput, SamplingParams

Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings with `role` and `content`."""


class LLM:
    """A model on this machine's ranks.

    Args:
        model: a Hugging Face directory, a `.gguf` file, a built-in name or a hub id.
        options: those of `kvspan generate --help`, with underscores, e.g.
            `tensor_parallel_size=2, decode_context_parallel_size=2`.

    Raises:
        ConfigError: it cannot run as asked (a `ValueError`).
        ModelError: the model cannot be found or read (a `ValueError`).
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = build_engine(EngineConfig.from_mapping({"model": model, **options}))

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, told: Callable[[Resolved], None] = lambda _: None
    ) -> Self:
        """The same from options that have been read already.

        Args:
            config: options.
            told: called with what will run before it is started.
        """
        llm = cls.__new__(cls)
        llm.engine = build_engine(config, told=told)
        return llm

    @property
    def resolved(self) -> Resolved:
        """What runs, and why."""
        return self.engine.core.resolved

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestError: it has none.
        """
        if self.engine.tokenizer is None:
            raise RequestError("This model has no tokenizer: it takes and gives token ids.")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """How requests are sampled that do not say it: as `--generation-config` has it."""
        return SamplingParams.from_mapping(self.resolved.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, batched together.

        Args:
            prompts: one or several: text, token ids, or a mapping with `prompt_token_ids`.
            sampling_params: for all prompts, or one for each; None = `get_default_sampling_params()`.
            use_tqdm: show a progress bar on a terminal.

        Returns:
            One output a prompt, in order.

        Raises:
            RequestError: a prompt or a parameter is refused; none has been run then.
            EngineDeadError: a rank died or hung.
        """
        several = _as_list(prompts)
        params = self._params_for(sampling_params, len(several))
        generations = [self.engine.prepare(p, s) for p, s in zip(several, params, strict=True)]
        self._run(generations, show_progress=use_tqdm)
        return [generation.result() for generation in generations]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, batched together.

        Args:
            messages: one conversation or several.
            sampling_params: for all, or one for each; None = `get_default_sampling_params()`.
            use_tqdm: show a progress bar on a terminal.
            add_generation_prompt: open the assistant's turn.
            chat_template: a Jinja template instead of the model's own.
            chat_template_kwargs: more for the template, e.g. `enable_thinking`.

        Returns:
            One output a conversation, in order.
        """
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.chat_prompt(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in several
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: the conversation.
            add_generation_prompt: open the assistant's turn.
            chat_template: a Jinja template instead of the model's own.
            chat_template_kwargs: more for the template.
        """
        tokenizer = self.get_tokenizer()
        if chat_template is not None:
            tokenizer = tokenizer.with_chat_template(chat_template)
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, template_kwargs=chat_template_kwargs
        )
        return tokenizer.encode(text)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """Completes one prompt, piece by piece.

        Args:
            prompt: text, token ids, or a mapping with `prompt_token_ids`.
            sampling_params: how tokens are chosen; None = `get_default_sampling_params()`.

        Yields:
            What each step added; `piece.generation.result()` is the whole so far. Closing the
            iterator aborts the request.
        """
        generation = self.engine.prepare(prompt, sampling_params or self.get_default_sampling_params())
        # Other requests may run steps as well, and what those make of this one lands here too.
        pieces = generation.listener = deque()
        self.engine.start(generation)
        try:
            while pieces or not generation.finished:
                if pieces:
                    yield pieces.popleft()
                else:
                    self.engine.step()
        finally:
            self.engine.abort(generation)

    def shutdown(self) -> None:
        """Ends all ranks; a second call does nothing."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts came with {len(params)} sampling_params.")
        return params

    def _run(self, generations: Sequence[Generation], *, show_progress: bool) -> None:
        """Runs requests to their end; whatever interrupts that, none of them stays behind."""
        for generation in generations:
            self.engine.start(generation)
        try:
            with _ProgressBar(len(generations), shown=show_progress) as bar:
                while not all(generation.finished for generation in generations):
                    bar.show(generations, len(self.engine.step()))
        finally:
            for generation in generations:
                self.engine.abort(generation)


class _ProgressBar:
    """Prompts done and tokens a second, on a terminal only."""

    def __init__(self, total: int, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._clock, self._num_tokens = WallClock(), 0
        self._started_s = self._clock.now_s()
        self._bar = Progress(
            TextColumn("Prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=total, rate="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, generations: Sequence[Generation], num_new: int) -> None:
        self._num_tokens += num_new
        rate = self._num_tokens / max(self._clock.now_s() - self._started_s, 1e-9)
        done = sum(generation.finished for generation in generations)
        self._bar.update(self._task, completed=done, rate=f"{rate:,.1f} rows/s")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several: a list of numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"Prompts are text or lists, not {type(prompts).__name__}.")
    if prompts and all(isinstance(each, Integral) for each in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
