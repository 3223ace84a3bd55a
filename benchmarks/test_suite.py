"""The suite: every case of the registry with every provider. `-m ops` (or solves, fc, ...) selects a section."""


def test_case(request, benchmark, board, case, provider):
    """Time the selected providers of the case together."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    together = [params["provider"] for params in selected if params.get("case") is case]
    board.run(benchmark, case, provider, together)
