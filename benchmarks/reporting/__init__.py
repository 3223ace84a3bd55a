"""The results page: reads the JSON under benchmarks/results and says in tables, figures and sentences what is in it."""
