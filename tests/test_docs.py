"""What the documentation says of the library is what the library does now."""

import support_tables


def test_the_page_of_what_is_supported_is_up_to_date():
    assert support_tables.PAGE.read_text() == support_tables.page(), "run `make docs`"
