-- Mint above a floor, only while the lease is still the holder's.
-- include: _mint
-- ARGV: holder, floor
-- Returns {'granted', token}, or {'not held', index, value or false, PTTL}, or {'poisoned'}.
-- Safe because of the first loop: a paused acquirer that wakes up after a takeover finds another holder and
-- mints nothing, so it cannot heal its way over a live one. A token already above the floor is returned as
-- it is: sent again after a lost answer, nothing changes.
local token
for i = 3, #KEYS, 2 do
  local value = call('GET', KEYS[i])
  if not value or sub(value, 3, 34) ~= ARGV[1] then
    return {'not held', (i - 3) / 2, value, call('PTTL', KEYS[i])}
  end
  token = tonumber(sub(value, 36, 51))
end
local floor = tonumber(ARGV[2])
if token <= floor then
  local t = call('TIME')
  token = mint(KEYS[1], floor, t[1] * 1000000 + t[2])
  if not token then return {'poisoned'} end
  for i = 3, #KEYS, 2 do
    local value = call('GET', KEYS[i])
    value = sub(value, 1, 35) .. string.format('%016.0f', token) .. sub(value, 52)
    call('SET', KEYS[i], value, 'KEEPTTL')
    if call('EXISTS', KEYS[i + 1]) == 1 then call('SET', KEYS[i + 1], value, 'KEEPTTL') end
  end
end
return {'granted', string.format('%016.0f', token)}
