"""Reasoning styles by name, and which of them a model writes."""

from kvspan.server.reasoning.split import ReasoningStyle

STYLES = (
    ReasoningStyle(name="deepseek_r1", always_thinks=True),
    ReasoningStyle(name="qwen3"),
    ReasoningStyle(name="seed_oss", opening="<seed:think>", closing="</seed:think>"),
)
NONE = "none"
NAMES = (*(style.name for style in STYLES), NONE)


def find_style(name: str, *, chat_template: str) -> tuple[ReasoningStyle | None, str]:
    """The style that an option asks for.

    Args:
        name: of a style, "none" (an answer is all content), or "auto".
        chat_template: the model's, may be empty.

    Returns:
        The style, None for none, and why.
    """
    for style in STYLES:
        if style.name == name:
            return style, "asked for"
    if name == NONE:
        return None, "asked for"
    # R1's own template cuts thoughts out of its history and so has the mark too, but does not open any:
    # the model does, or the newer template. So what is not opened is content, unless it is asked for.
    for style in STYLES[1:]:
        if style.closing in chat_template or style.opening in chat_template:
            return style, f"the chat template has {style.closing}"
    return None, "the chat template has no mark of a thought"
