-- How a token is minted: INCR, lifted to the clock (`now`, in microseconds) and above the floor. nil when that
-- would poison the shard: a floor a year above the clock, or beyond 2^53.
-- Numbers leave through format: '..' and tostring turn 1794991952984512 into 1.7949919529845e+15.
-- Safe because the counter is raised before any lease carries the token, in one script: whatever is lost
-- afterwards, no later mint returns it again. A server that came back empty, or with an old counter, is lifted
-- to its clock, which is above every token it issued before, as those were at most its clock then.
local function mint(counter, floor, now)
  if floor > now + 31536000000000 or now >= 9007199254740991 then return nil end
  local token = call('INCR', counter)
  local least = now
  if floor >= least then least = floor + 1 end
  if token < least then
    token = least
    call('SET', counter, string.format('%.0f', token))
  end
  if token > 9007199254740991 then return nil end
  return token
end
