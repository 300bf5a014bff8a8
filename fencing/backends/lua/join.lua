-- Agree on the number of shards of a namespace: the first to say it decides.
-- KEYS: shards. ARGV: shards. Returns the number that counts.
-- Safe because a resource's shard depends on the number: two processes with different numbers would take
-- the same resource in two shards. The one that comes second is refused before it takes anything.
call('SETNX', KEYS[1], ARGV[1])
return call('GET', KEYS[1])
