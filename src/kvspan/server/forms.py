"""The form that a request wants its output to have, by whichever of the names that the field knows.

    response_format         json_object, json_schema; regex and grammar, which are ours
    structured_outputs      vLLM's
    guided_json, ..         vLLM's older ones

Schemas come from libraries, with keywords that no grammar has, and so do those of tools: what cannot be
held to is left out of either, and told. Knows names. Knows no grammar library and no tokens.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from kvspan.errors import RequestError, blaming
from kvspan.sampling.grammar import left_out
from kvspan.server.protocol import Sampled
from kvspan.structured import StructuredOutputsParams

GUIDED = ("json", "regex", "choice", "grammar")
"""Names of vLLM's older fields, without `guided_`."""


def read_form(
    *,
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
) -> StructuredOutputsParams | None:
    """The form, None for free text. Keywords of schemas that cannot be held to are left out of it.

    Args:
        response_format: OpenAI's field.
        structured_outputs: vLLM's.
        guided: vLLM's older fields, by name without `guided_`; those that are None are not asked for.

    Raises:
        RequestError: two of them are asked for, or one is no form.
    """
    older = {name: value for name, value in guided.items() if value is not None}
    with blaming("response_format"):
        formats = {} if response_format is None else _of_format(response_format)
    guide = f"guided_{next(iter(older), '')}"
    forms = {"response_format": formats, "structured_outputs": structured_outputs or {}, guide: older}
    asked = {name: form for name, form in forms.items() if form}
    if not asked:
        return None
    (name, form), *others = asked.items()
    if others:
        raise RequestError(
            "response_format, structured_outputs and guided_... say the same thing: give one of them.",
            param=others[0][0],
        )
    with blaming(name):
        return replace(StructuredOutputsParams.from_mapping(form), lenient=True)


async def form_notes(form: StructuredOutputsParams | None, field: str) -> tuple[str, ...]:
    """Says what of a form the output is not held to, off the event loop: a large one takes a while.

    Args:
        form: any; None = free text.
        field: by which it came, to be blamed.

    Raises:
        RequestError: it is a grammar that is none.
    """
    with blaming(field):
        names = () if form is None else await asyncio.to_thread(left_out, form)
    return (
        (f"The output is not held to these keywords of its schema: {', '.join(names)}.",)
        if names
        else ()
    )


def form_field(request: Sampled) -> str:
    """The field by which a request asks for a form."""
    older = (f"guided_{name}" for name in GUIDED)
    fields = ("structured_outputs", *older, "response_format")
    return next((name for name in fields if getattr(request, name) is not None), "structured_outputs")


def _of_format(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `response_format` asks for, by the names of `StructuredOutputsParams`."""
    kind = asked.get("type")
    match kind:
        case "text":
            return {}
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": _schema(asked.get("json_schema"))}
        case "regex" | "grammar":
            return {kind: asked.get(kind)}
    raise RequestError(
        f"response_format.type must be text, json_object, json_schema, regex or grammar, got {kind!r}."
    )


def _schema(described: Any) -> Any:
    if not isinstance(described, Mapping):
        raise RequestError("response_format.json_schema must be an object with a schema.")
    schema = described.get("schema")
    if not isinstance(schema, dict | bool):
        raise RequestError("response_format.json_schema.schema must be a JSON schema.")
    return schema
