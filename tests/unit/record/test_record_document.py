"""The documents describe the current tables."""

from telescope.record.query import describe_tables
from telescope.record.tables import TABLES


def test_every_table_and_column_is_described():
    for table in TABLES.values():
        assert table.doc.endswith(".")
        assert all(column.doc for column in table.columns)
        assert len(set(table.column_names)) == len(table.columns)
        assert set(table.key) <= set(table.column_names)


def test_the_command_line_describes_every_column():
    text = describe_tables()
    assert all(column.name in text and column.doc in text for table in TABLES.values() for column in table.columns)


def test_rows_that_a_resume_can_supersede_have_a_step_and_an_attempt():
    by_step = {name for name, table in TABLES.items() if table.by_step}
    assert by_step == {"steps", "step_stats", "groups", "samples", "evals", "eval_samples", "tokens"}
    assert all({"attempt", "step"} <= set(table.column_names) for table in TABLES.values() if table.by_step)
