"""The report on finished runs: tables, verdicts and figures, as Markdown and as one page of HTML."""
