"""States made of states that live: of another spec (redistribute, freeze), or with other trees in them (replace)."""
