"""A prompt is cleaned as Wan's own code does it: the model was trained on ids of such text."""

import html
import re

from scope_rt.optional_packages import need


def cleaned(prompt: str) -> str:
    """Mend wrong decoding, take HTML's entities for what they mean, and collapse white space.

    Raises:
        UserInputError: ftfy is not installed.
    """
    need("ftfy", purpose="cleaning prompts of Wan's text encoder")
    import ftfy

    mended = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", mended).strip()
