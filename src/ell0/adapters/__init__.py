"""The field's tools, both ways: our attacks inside them, theirs inside `ell0.evaluate`; a module for each library."""
