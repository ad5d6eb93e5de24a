"""The HTML pages and figures about one run or several."""
