"""States of another spec made of states that live: redistribute, freeze, and memory given back."""
