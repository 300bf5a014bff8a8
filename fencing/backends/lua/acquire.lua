-- Take every resource and mint one token, or take nothing.
-- include: _mint
-- ARGV: holder, ttl ms, note ms (0: no note), floor, label
-- Returns {'granted', token, index, note, note's PTTL, index, ...} with what earlier holders left,
--      or {'busy', index, value, PTTL} of the first resource that somebody else holds,
--      or {'poisoned'}.
-- Safe because it is one script: nobody can take a resource between the look and the SET, and the token is
-- minted while nobody else can hold. Sent again by the same holder it returns the same token, so a lost
-- answer may be asked for again; the TTL then counts from the later arrival, which only lengthens it.
local holder, ttl, note_ttl, last = ARGV[1], ARGV[2], ARGV[3], #KEYS
local mine, token = 0, nil
for i = 3, last, 2 do
  local value = call('GET', KEYS[i])
  if value then
    if sub(value, 3, 34) ~= holder then return {'busy', (i - 3) / 2, value, call('PTTL', KEYS[i])} end
    mine = mine + 2
    token = sub(value, 36, 51)
  end
end
if mine == last - 2 then
  for i = 3, last, 2 do
    if call('PTTL', KEYS[i]) < tonumber(ttl) then
      call('PEXPIRE', KEYS[i], ttl)
      if note_ttl ~= '0' then call('PEXPIRE', KEYS[i + 1], note_ttl) end
    end
  end
  return {'granted', token}
end
local reply = {'granted', ''}
for i = 3, last, 2 do
  local note = call('GET', KEYS[i + 1])
  if note and sub(note, 3, 34) ~= holder then
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3] = (i - 3) / 2, note, call('PTTL', KEYS[i + 1])
  end
end
local t = call('TIME')
local now = t[1] * 1000000 + t[2]
token = mint(KEYS[1], tonumber(ARGV[4]), now)
if not token then return {'poisoned'} end
local at = string.format('%016.0f', now)
token = token == now and at or string.format('%016.0f', token)
reply[2] = token
-- Nothing was written before the mint, and nothing below can fail: all or nothing also when a key is not ours.
local value = '1 ' .. holder .. ' ' .. token .. ' ' .. at .. ' h ' .. ARGV[5]
for i = 3, last, 2 do
  call('SET', KEYS[i], value, 'PX', ttl)
  if note_ttl ~= '0' then
    call('SET', KEYS[i + 1], value, 'PX', note_ttl)
  else
    call('DEL', KEYS[i + 1])
  end
end
return reply
