"""Findings about a serving recipe: each is about SGLang, which is to serve it."""

from functools import partial

from ..export import findings

defect = partial(findings.defect, engine="SGLang")
warning = partial(findings.warning, engine="SGLang")
note = partial(findings.note, engine="SGLang")
