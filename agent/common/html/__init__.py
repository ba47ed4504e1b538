"""Pages and charts for people, which fetch nothing from a network: reports are made of them.

Reading order: `text` (words of strangers, made safe to show), `charts` (SVG, drawn here), `pages` (Jinja2 templates, in
`templates/` with their style and script).

No daemon imports this package: reports are made by a job's child process and by commands.

Public names:
    text    visible
    charts  Series, Mark, line_chart, histogram_chart, stacked_bars, timeline, scatter_chart, strip
    pages   Section, Table, Figure, render_report, environment, resource
"""
