"""The style sheet of the HTML report: light and dark by what the reader's system prefers, readable on a phone and on paper."""

from __future__ import annotations

_LIGHT = """
--ground:#fcfcfb;--card:#f3f3f0;--ink:#1d1f23;--quiet:#5f646d;--rule:#dedfda;--up:#2a78d6;--down:#d1495b;--open:#a9b0ba;
--whisker:#12335c;--c0:#2a78d6;--c1:#e07b00;--c2:#0f9d76;--c3:#8a5cd6;--c4:#c43d6b;--c5:#7a8b00;--c6:#00829b;--c7:#6b6f76
"""
_DARK = """
--ground:#16181c;--card:#1f2228;--ink:#e9eaec;--quiet:#a2a8b3;--rule:#343942;--up:#4a90e2;--down:#e06c7c;--open:#5d6470;
--whisker:#dfe9f7;--c0:#5da2f0;--c1:#f2a33c;--c2:#3cc79d;--c3:#b18bf0;--c4:#f078a0;--c5:#c2d14a;--c6:#4cc3dc;--c7:#a4aab4
"""
_PAGE = """
body{font:15px/1.55 system-ui,sans-serif;max-width:1560px;margin:2rem auto 4rem;padding:0 1.2rem;background:var(--ground);
color:var(--ink)}
h1{font-size:1.6rem;margin-bottom:.4rem}h2{font-size:1.2rem;margin:2.6rem 0 .6rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
.note{color:var(--quiet);font-size:13px;max-width:75ch}
.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.tile{background:var(--card);border-radius:8px;padding:.7rem 1rem;min-width:9rem}
.tile b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}.tile span{color:var(--quiet);font-size:13px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;margin:.4rem 0 1rem;font-variant-numeric:tabular-nums}
th,td{padding:.24rem .5rem;text-align:right;white-space:nowrap}
th{color:var(--quiet);font-weight:600;border-bottom:1px solid var(--rule);white-space:normal;vertical-align:bottom}
td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:9rem;max-width:22rem;position:sticky;left:0;background:var(--ground)}
td{border-bottom:1px solid var(--rule)}td:first-child,th:first-child{text-align:left}
table.heat td{border:2px solid var(--ground);border-radius:4px;min-width:3.2rem}
td.up{background:color-mix(in srgb,var(--up) calc(var(--v)*1%),var(--ground))}
td.down{background:color-mix(in srgb,var(--down) calc(var(--v)*1%),var(--ground))}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--quiet)}
pre{font-size:12px;overflow:auto;background:var(--card);padding:.8rem;border-radius:8px}
"""
_PLOTS = """
svg{width:100%;max-width:960px;height:auto;font:13px system-ui,sans-serif;display:block}
text.ink{fill:var(--ink)}text.quiet{fill:var(--quiet);font-size:12px}
.axis{stroke:var(--quiet)}.grid{stroke:var(--rule)}.mark{stroke:var(--ink);stroke-dasharray:4 3}
.whisker{stroke:var(--whisker);stroke-width:1.5;opacity:.75}
rect.up{fill:var(--up)}rect.down{fill:var(--down)}rect.open{fill:var(--open)}
g polyline{fill:none;stroke-width:2}
"""
_SERIES = "".join(f"g.c{i} polyline{{stroke:var(--c{i})}}g.c{i} circle{{fill:var(--c{i})}}" for i in range(8))

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}{_PAGE}{_PLOTS}{_SERIES}"
    f"@media print{{:root{{{_LIGHT}}}.wide{{overflow:visible}}table{{font-size:9px}}th,td{{padding:.1rem .2rem}}}}"
)
