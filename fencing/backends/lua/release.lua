-- Free what is the holder's, and count for how long it was held, one in ten. Compare and delete.
-- ARGV: holder
-- Returns {'done'}, or {'not held', index, value or false, PTTL} of the first that was not the holder's; the
-- others are freed all the same.
-- Safe because the comparison and the DEL are one script: it cannot delete somebody else's lease.
local reply, acquired
for i = 3, #KEYS, 2 do
  local value = call('GET', KEYS[i])
  if value and sub(value, 3, 34) == ARGV[1] then
    if sub(value, 51, 51) == '0' then acquired = sub(value, 53, 68) end -- the token's last digit draws the tenth
    call('DEL', KEYS[i], KEYS[i + 1])
  elseif not reply then
    reply = {'not held', (i - 3) / 2, value, call('PTTL', KEYS[i])}
  end
end
if acquired then
  local t = call('TIME')
  local _, exponent = math.frexp((t[1] * 1000000 + t[2] - acquired) / 1000)
  redis.pcall('HINCRBY', KEYS[2], exponent, 1) -- a count that fails must not make a release look failed
end
return reply or {'done'}
