"""Checks of anybody's code: global process groups, constructors, paired test runs.

It reads code with `ast` and never imports it, needs the standard library alone, and knows nothing else of
shardweave: a maintainer of any code runs it. The parts:

- `finding` is what all checks say; `files` finds the code, `scopes` knows which name is what where, `names`
  follows a name through imports of the tree, `presets` and `config` say which names count, `groups` joins
  them, `baseline` keeps a number that can only fall;
- `constructors` says who constructs a class, and with what;
- `paired` compares two test runs as sets.
"""
