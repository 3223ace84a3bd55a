"""The report on a set of runs: reading them, judging the paper's claims, tables, pictures, HTML and Markdown."""
