"""Pictures of layouts and plans: which rank holds which rows, before and after.

``model`` turns a layout or a plan into rows of bands; ``text`` draws them in a terminal, ``svg`` in a
page. Every picture is drawn from the same data that moves the bytes, so none can be out of date.
"""

from __future__ import annotations
