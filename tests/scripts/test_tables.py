from scripts.tables import markdown_table


def test_cells_cannot_break_the_table():
    assert markdown_table("a | b", [[1, "x | y"]]) == "| a | b |\n| --- | --- |\n| 1 | x / y |\n"
