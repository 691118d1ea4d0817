"""Whether a string is text. Knows strings alone."""

from kvspan.errors import RequestError


def check_unicode(name: str, text: str) -> str:
    r"""`text`, unless it cannot be written as UTF-8, as no text of JSON's `"\ud800"` can.

    Args:
        name: what it is, for the sentence.
        text: from outside.

    Raises:
        RequestError: it has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is no Unicode text: it has half of a surrogate pair.") from error
    return text
