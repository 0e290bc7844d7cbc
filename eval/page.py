"""report.html: the report as one file that opens without a network, with samples of what was accepted."""

import base64
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt

from eval.markdown import to_markdown
from eval.report import Report

TEMPLATE = Path(__file__).with_name("page.html.j2")


def to_html(report: Report, folder: Path) -> str:
    """The Markdown of the report as a page, the plots of `folder` inside it, and its samples token by token."""
    # No HTML of a prompt's or a path's own gets into the page: the parser keeps none, the template escapes.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(to_markdown(report))
    for plot in sorted((folder / "plots").glob("*.png")):
        content = base64.b64encode(plot.read_bytes()).decode()
        body = body.replace(f'src="plots/{plot.name}"', f'src="data:image/png;base64,{content}"')
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return page.render(report=report, body=body)
