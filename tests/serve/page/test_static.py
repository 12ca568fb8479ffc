"""The page's files agree with each other, need nothing from elsewhere, and can be read by all."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import scope_runners.serve

PAGE = Path(scope_runners.serve.__file__).parent / "page"
SCRIPTS = sorted(PAGE.glob("*.js"))
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3 level AA

TEXT_ON_GROUND = [
    ("ink", "ground"),
    ("ink", "raised"),
    ("ink", "control"),
    ("soft", "ground"),
    ("soft", "raised"),
    ("soft", "control"),
    ("soft", "sunken"),
    ("accent", "ground"),
    ("accent", "accent-dim"),
    ("on-accent", "accent"),
    ("warn", "warn-ground"),
    ("bad", "bad-ground"),
    ("bad", "ground"),
]


class Elements(HTMLParser):
    """Every element of the page as (tag, attributes), and the attributes of those in a label."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.in_labels: list[dict[str, str | None]] = []
        self._in_label = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag == "label":
            self._in_label = True
        elif self._in_label:
            self.in_labels.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if tag == "label":
            self._in_label = False


def parsed() -> Elements:
    parser = Elements()
    parser.feed((PAGE / "index.html").read_text())
    return parser


def elements() -> list[tuple[str, dict[str, str | None]]]:
    return parsed().all


def colours(scheme: str) -> dict[str, tuple[int, int, int]]:
    """The named colours of the stylesheet, dark ones first and light ones in their media query."""
    dark, light = re.findall(r":root \{(.*?)\n\s*\}", (PAGE / "style.css").read_text(), re.DOTALL)
    text = dark if scheme == "dark" else light
    found = re.findall(r"--([a-z-]+): #([0-9a-f]{6})", text)
    return {
        name: (int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16))
        for name, digits in found
    }


def luminance(colour: tuple[int, int, int]) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize(("text", "ground"), TEXT_ON_GROUND)
def test_text_stands_out_from_its_ground(scheme: str, text: str, ground: str) -> None:
    known = colours(scheme)
    low, high = sorted((luminance(known[text]), luminance(known[ground])))
    assert (high + 0.05) / (low + 0.05) >= LEAST_CONTRAST


def test_a_strict_content_policy_refuses_nothing_of_the_page() -> None:
    for tag, attributes in elements():
        assert tag != "style"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "script":
            assert attributes.get("src")
    for script in SCRIPTS:
        assert not re.search(r"\beval\(|new Function|innerHTML|document\.write", script.read_text())


def test_page_asks_no_other_host_for_anything() -> None:
    for file in PAGE.iterdir():
        text = file.read_text().replace(SVG_NAMESPACE, "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", text), file.name


def test_every_file_that_the_page_names_is_there() -> None:
    named = {
        value
        for _, attributes in elements()
        for key, value in attributes.items()
        if key in ("src", "href") and value and value.startswith("/static/")
    }
    assert named
    for address in named:
        assert (PAGE / address.removeprefix("/static/")).is_file(), address


def test_every_element_that_a_script_asks_for_is_in_the_page() -> None:
    there = {attributes["id"] for _, attributes in elements() if "id" in attributes}
    asked = {
        name for script in SCRIPTS for name in re.findall(r'byId\("([^"]+)"\)', script.read_text())
    }
    assert asked
    assert asked <= there


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_name_that_a_script_imports_is_exported(script: Path) -> None:
    for names, source in re.findall(r'import \{([^}]+)\} from "\./([^"]+)"', script.read_text()):
        exported = (PAGE / source).read_text()
        for name in (part.strip() for part in names.split(",")):
            assert re.search(rf"export (async )?(class|function|const) {name}\b", exported), name


def test_every_input_has_a_label() -> None:
    page = parsed()
    named = {attributes.get("for") for tag, attributes in page.all if tag == "label"}
    inputs = [attributes for tag, attributes in page.all if tag in ("input", "select")]
    assert inputs
    for attributes in inputs:
        inside = attributes in page.in_labels
        assert inside or attributes.get("id") in named or "aria-label" in attributes, attributes
