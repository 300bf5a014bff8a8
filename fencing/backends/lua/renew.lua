-- Count the TTL anew, if every resource is still the holder's. Compare and PEXPIRE; never to less than is left.
-- ARGV: holder, ttl ms, note ms (0: no note)
-- Returns {'done'}, or {'not held', index, value or false, PTTL} of the first that is not; nothing is then changed.
-- Safe because the comparison and the PEXPIRE are one script: it cannot prolong somebody else's lease. And because
-- it never shortens: a renewal that was given up and arrives late cannot end a lease before the end that a later
-- one was promised.
for i = 3, #KEYS, 2 do
  local value = call('GET', KEYS[i])
  if not value or sub(value, 3, 34) ~= ARGV[1] then
    return {'not held', (i - 3) / 2, value, call('PTTL', KEYS[i])}
  end
end
for i = 3, #KEYS, 2 do
  if call('PTTL', KEYS[i]) < tonumber(ARGV[2]) then
    call('PEXPIRE', KEYS[i], ARGV[2])
    if ARGV[3] ~= '0' then call('PEXPIRE', KEYS[i + 1], ARGV[3]) end
  end
end
return {'done'}
