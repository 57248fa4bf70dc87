"""What tests of tiercache and of tiers made by others need: contract suites, simulation."""
